"""Strip arithmetic and streamed group norms against one whole pass of PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from diffaccel.vae.exact import group_norm
from diffaccel.vae.exact.group_norm import Moments
from diffaccel.vae.exact.kl_blocks import WholeMap
from diffaccel.vae.exact.live_bytes import LiveBytes
from diffaccel.vae.tiles import below_doubling, below_halving, halved, strips, tallest, with_halo


@pytest.mark.parametrize("height", [1, 2, 7, 16, 37])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 100])
def test_strips_cover_every_row_once(height: int, rows: int) -> None:
    cut = strips(height, rows)
    assert [row for first, end in cut for row in range(first, end)] == list(range(height))
    sizes = [end - first for first, end in cut]
    assert max(sizes) == tallest(height, rows) <= rows and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_convolution_in_strips(rows: int) -> None:
    x, conv = torch.randn(1, 3, 11, 5), torch.nn.Conv2d(3, 4, 3, padding=1)
    whole, parts = conv(x), []
    for strip in strips(11, rows):
        first, end = with_halo(strip, 1, 11)
        made = conv(x[:, :, first:end])
        parts.append(made[:, :, strip[0] - first : strip[1] - first])
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    bare = torch.cat([conv(x[:, :, first:end]) for first, end in strips(11, rows)], 2)
    assert rows >= 11 or not torch.allclose(bare, whole), "without a halo it must differ"


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_doubling_and_halving(rows: int) -> None:
    x = torch.randn(1, 2, 9, 4)
    doubled = F.interpolate(x, scale_factor=2.0, mode="nearest")
    for strip in strips(18, rows):
        first, end = below_doubling(strip, 9)
        made = F.interpolate(x[:, :, first:end], scale_factor=2.0, mode="nearest")
        assert torch.equal(made[:, :, strip[0] - 2 * first : strip[1] - 2 * first], doubled[:, :, strip[0] : strip[1]])
    conv = torch.nn.Conv2d(2, 2, 3, stride=2)
    for height in (8, 9):
        above = x[:, :, :height]
        whole = conv(F.pad(above, (0, 1, 0, 1)))
        assert whole.shape[2] == halved(height)
        for strip in strips(halved(height), rows):
            first, end = below_halving(strip, height)
            made = conv(F.pad(above[:, :, first:end], (0, 1, 0, 1)))
            torch.testing.assert_close(made, whole[:, :, strip[0] : strip[1]])


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_moments_of_strips_are_those_of_the_map(rows: int, offset: float) -> None:
    """With a mean far from zero a sum of squares would lose the variance; the parallel formula does not."""
    x = torch.randn(1, 8, 16, 6, generator=torch.Generator().manual_seed(0)) + offset
    x[:, :, 8:] *= 0.2  # rows differ, so that the statistics of a strip are not those of the map
    norm = torch.nn.GroupNorm(4, 8, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
        norm.bias.copy_(torch.randn(8))
        truth = F.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double(), 1e-6)
        seen, one = Moments(4), Moments(4)
        for first, end in strips(16, rows):
            seen.add(x[:, :, first:end])
        one.add(x[:, :, :3])

        def apart(moments: Moments) -> float:
            folded = moments.scale_and_shift(norm.weight, norm.bias, norm.eps, 8)
            return float((group_norm.apply(x, *folded, x.dtype) - truth).abs().max())

        assert apart(seen) <= max(2 * float((norm(x) - truth).abs().max()), 1e-5)
        assert apart(one) > 0.1, "the statistics of a few rows must show"


def test_half_precision_is_rounded_once() -> None:
    x = torch.randn(1, 8, 6, 6).bfloat16()
    norm = torch.nn.GroupNorm(4, 8).bfloat16()
    seen = Moments(4)
    seen.add(x[:, :, :2])
    seen.add(x[:, :, 2:])
    with torch.no_grad():
        made = group_norm.apply(x, *seen.scale_and_shift(norm.weight, norm.bias, norm.eps, 8), x.dtype)
        torch.testing.assert_close(made, norm(x), rtol=1e-2, atol=1e-2)
    assert made.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_map_still_reads_what_was_overwritten(rows: int) -> None:
    x = torch.arange(13.0).view(1, 1, 13, 1)
    held = WholeMap(x.clone(), behind=2)
    for strip in strips(13, rows):
        wide = with_halo(strip, 2, 13)
        assert torch.equal(held.read(wide), x[:, :, wide[0] : wide[1]])
        held.write(strip, -held.read(strip))
    assert torch.equal(held.tensor, -x)


def test_live_bytes() -> None:
    old = torch.ones(100)
    with LiveBytes() as live:
        first = old + 1
        second = first * 2
        view = second[:10]
        assert live.now_bytes == live.peak_bytes == 800
        del first, second
        assert live.now_bytes == 400, "the view holds the storage"
        old.add_(1)
        del view
        assert (live.now_bytes, live.peak_bytes) == (0, 800)
