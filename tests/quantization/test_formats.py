"""Scaled 8-bit numbers against plain arithmetic: errors do not depend on magnitude, products are of the values."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from diffaccel.quantization import formats

KINDS = (formats.FP8, torch.int8)


def _relative(given: torch.Tensor, truth: torch.Tensor) -> float:
    return float((given.float() - truth.float()).norm() / truth.float().norm())


@pytest.mark.parametrize("kind", KINDS, ids=("fp8", "int8"))
@pytest.mark.parametrize("rows", (True, False), ids=("row", "tensor"))
def test_the_error_is_the_same_at_every_magnitude(kind: torch.dtype, rows: bool) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    for size in (1e3, 1.0, 1e-3, 1e-6, 1e-12):
        error = _relative(
            formats.dequantize(*formats.quantize(weight * size, kind, rows), torch.float32), weight * size
        )
        assert error < (0.03 if kind is formats.FP8 else 0.01), f"absmax {size:g}"


def test_a_cast_without_a_scale_loses_small_weights() -> None:
    """The negative control of the test above: what diffusers' layerwise casting does."""
    weight = 1e-3 * torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    assert _relative(weight.to(formats.FP8), weight) > 0.2
    assert _relative((weight * 0.1).to(formats.FP8), weight * 0.1) > 0.9


@pytest.mark.parametrize("kind", KINDS, ids=("fp8", "int8"))
def test_rows_of_zeros_stay_zero(kind: torch.dtype) -> None:
    weight = torch.randn(32, 64)
    weight[3] = 0
    x = torch.randn(5, 64)
    x[2] = 0  # a padded token
    for product in (formats.weight_only, formats.dynamic):
        y = product(x, *formats.quantize(weight, kind, True), None)
        assert torch.isfinite(y).all() and (y[:, 3] == 0).all() and (y[2] == 0).all()
    codes, scale = formats.quantize(torch.zeros(4, 4), kind, False)
    assert (formats.dequantize(codes, scale, torch.float32) == 0).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", KINDS, ids=("fp8", "int8"))
@pytest.mark.parametrize("rows", (True, False), ids=("row", "tensor"))
def test_products_are_those_of_the_dequantized_values(dtype: torch.dtype, kind: torch.dtype, rows: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(48, 64, generator=generator), torch.randn(48, generator=generator)
    x = torch.randn(2, 7, 64, generator=generator).to(dtype)
    codes, scale = formats.quantize(weight, kind, rows)
    exact = formats.dequantize(codes, scale, torch.float64)
    close = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    truth = functional.linear(x.double(), exact, bias.double())
    assert _relative(formats.weight_only(x, codes, scale, bias.to(dtype)), truth) < close
    flat = x.reshape(-1, 64)
    seen = formats.dequantize(*formats.quantize(flat, kind, rows, exact_scale=True), torch.float64).reshape(x.shape)
    truth = functional.linear(seen, exact, bias.double())
    assert _relative(formats.dynamic(x, codes, scale, bias.to(dtype)), truth) < close


def test_half_precision_does_not_overflow() -> None:
    """In float16 a product of bare codes would: 64 * 448 * 60 is beyond 65504."""
    x, weight = torch.full((1, 64), 60.0, dtype=torch.float16), torch.full((16, 64), 0.01)
    codes, scale = formats.quantize(weight, formats.FP8, True)
    assert torch.isinf(functional.linear(x, codes.half())).all(), "the negative control"
    y = formats.weight_only(x, codes, scale, None)
    assert torch.allclose(y.float(), torch.full((1, 16), 38.4), rtol=0.05)


def test_scales_of_weights_are_bfloat16_numbers_and_cover_the_largest() -> None:
    weight = torch.randn(512, 16, generator=torch.Generator().manual_seed(2))
    for kind in KINDS:
        codes, scale = formats.quantize(weight, kind, True)
        assert torch.equal(scale, scale.bfloat16().float())
        assert (codes.float().abs().amax(dim=1) <= formats.LARGEST[kind]).all()
        assert (scale[:, 0] * formats.LARGEST[kind] >= weight.abs().amax(dim=1) * (1 - 1e-6)).all(), (
            "nothing is cut off"
        )


@pytest.mark.parametrize("rows", (True, False), ids=("row", "tensor"))
def test_in_pieces_it_is_the_same(monkeypatch: pytest.MonkeyPatch, rows: bool) -> None:
    weight = torch.randn(37, 5, 3, generator=torch.Generator().manual_seed(3)).bfloat16()
    for kind in KINDS:
        whole = formats.quantize(weight, kind, rows)
        monkeypatch.setitem(formats._PIECE, "cpu", 60)
        pieces = formats.quantize_weight(weight, kind, rows)
        assert torch.equal(whole[0].float(), pieces[0].float()) and torch.equal(whole[1], pieces[1])


def test_tokens_do_not_depend_on_each_other_with_a_scale_per_row() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    for kind in KINDS:
        codes, scale = formats.quantize(torch.randn(32, 64), kind, True)
        alone, together = formats.dynamic(x[:1], codes, scale, None), formats.dynamic(x * 1.0, codes, scale, None)[:1]
        louder = x.clone()
        louder[1:] *= 1000
        assert torch.allclose(alone, together, rtol=1e-5, atol=1e-5)
        assert torch.allclose(formats.dynamic(louder, codes, scale, None)[:1], alone, rtol=1e-5, atol=1e-5)
    codes, scale = formats.quantize(torch.randn(32, 64), formats.FP8, False)
    assert not torch.allclose(
        formats.dynamic(louder, codes, scale, None)[:1], formats.dynamic(x, codes, scale, None)[:1]
    )


def test_no_tokens_at_all() -> None:
    codes, scale = formats.quantize(torch.randn(32, 64), formats.FP8, True)
    assert formats.dynamic(torch.zeros(0, 64), codes, scale, torch.zeros(32)).shape == (0, 32)
