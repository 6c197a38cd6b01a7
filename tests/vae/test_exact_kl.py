"""Exact strips of AutoencoderKL against the plain decode and encode, the bytes they hold, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch

from diffaccel.vae.exact import kl as exact_kl
from diffaccel.vae.exact.live_bytes import LiveBytes
from tests.vae import vaes
from tests.vae.exact import apart, latents, plain_decode, vae, vaes_in

MODES = exact_kl.MODES


# ---- the same picture -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (37, 53), (5, 3), (1, 1), (2, 19)])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_decode_is_the_plain_one(size: tuple[int, int], mode: str) -> None:
    model = vae("narrow")
    z = latents(*size)
    kept, truth = z.clone(), plain_decode(model, z)
    for rows in (None, 1, 3, 100):
        assert apart(exact_kl.decode(model, z, rows=rows, mode=mode), truth) < 1e-5
    assert torch.equal(z, kept), "the latents were written to"


@pytest.mark.parametrize("size", [(64, 64), (37 * 8, 53 * 8), (41, 27), (8, 8)])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_encode_is_the_plain_one(size: tuple[int, int], mode: str) -> None:
    """Sizes that are no multiple of the compression too: diffusers takes them, rounding down at each level."""
    model = vae("narrow")
    x = latents(*size, channels=3)
    kept, truth = x.clone(), model._encode(x)
    for rows in (None, 1, 3):
        assert apart(exact_kl.encode(model, x, rows=rows, mode=mode), truth) < 1e-5
    assert torch.equal(x, kept)


@pytest.mark.parametrize("kind", ["wide", "flux2"])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_other_autoencoders_and_batches(kind: str, mode: str) -> None:
    model = vae(kind)
    z = latents(11, 6, batch=3)
    assert apart(exact_kl.decode(model, z, rows=1, mode=mode), plain_decode(model, z)) < 1e-5
    x = latents(48, 32, batch=2, channels=3)
    assert apart(exact_kl.encode(model, x, rows=1, mode=mode), model._encode(x)) < 1e-5


@torch.no_grad()
def test_statistics_of_a_strip_would_show() -> None:
    """Negative control: the same strips, each with its own group-norm statistics, are far from the plain picture."""
    model, z = vae("narrow"), latents(16, 16)
    truth = plain_decode(model, z)
    tiles = torch.cat([plain_decode(model, z[:, :, i : i + 4]) for i in range(0, 16, 4)], dim=2)
    assert apart(tiles, truth) > 0.05
    assert apart(exact_kl.decode(model, z, rows=4, mode="fast"), truth) < 1e-5


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_bfloat16_is_as_near_to_the_truth_as_plain(mode: str) -> None:
    """Equality is claimed in float32. In bfloat16 strips and the plain decode round differently, equally far off."""
    model, z = vae("wide"), latents(12, 10)
    truth = plain_decode(model, z)
    half = vaes_in(torch.bfloat16)
    plain = plain_decode(half, z.bfloat16()).float()
    found = exact_kl.decode(half, z.bfloat16(), rows=1, mode=mode)
    assert found.dtype == torch.bfloat16

    def rms(x: torch.Tensor) -> float:
        return float((x - truth).pow(2).mean().sqrt() / truth.std())

    assert rms(found.float()) < 1.25 * rms(plain) + 1e-3
    assert apart(found.float(), plain) < 0.05


@torch.no_grad()
def test_autocast() -> None:
    model, z = vae("wide"), latents(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = plain_decode(model, z)
        found = exact_kl.decode(model, z, rows=1, mode="fast")
    assert found.dtype == plain.dtype and apart(found.float(), plain.float()) < 0.05


@torch.no_grad()
def test_channels_last() -> None:
    model, z = copy.deepcopy(vae("wide")).to(memory_format=torch.channels_last), latents(9, 8)
    z = z.to(memory_format=torch.channels_last)
    for mode in MODES:
        assert apart(exact_kl.decode(model, z, rows=1, mode=mode), plain_decode(model, z)) < 1e-5


# ---- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@torch.no_grad()
def test_bytes_held(encode: bool) -> None:
    """Widths in the proportion of the real ones: the stated shares of the plain peak, and predictions within 5 %."""
    model = vae("wide")
    given = latents(192, 192, channels=3) if encode else latents(24, 24)
    work = exact_kl.encode if encode else exact_kl.decode
    with LiveBytes() as live:
        model._encode(given) if encode else plain_decode(model, given)
    plain = live.peak_bytes
    assert exact_kl.plain_bytes(model, given.shape, itemsize=4, encode=encode) == pytest.approx(plain, rel=0.05)
    for mode, most in (("fast", 0.75), ("low", 0.45)):
        before = 0
        for rows in (1, 2):
            with LiveBytes() as live:
                work(model, given, rows=rows, mode=mode)
            said = exact_kl.peak_bytes(model, given.shape, rows=rows, mode=mode, itemsize=4, encode=encode)
            assert said == pytest.approx(live.peak_bytes, rel=0.05)
            assert said >= before
            before = said
            assert live.peak_bytes <= most * plain, (mode, rows, live.peak_bytes / plain)


@torch.no_grad()
def test_bytes_of_a_batch_and_of_half_precision() -> None:
    """A batch costs its finished pictures, not its maps."""
    model, half = vae("wide"), vaes_in(torch.bfloat16)
    for mode in MODES:
        for made, z, itemsize in ((model, latents(16, 16, 3), 4), (half, latents(8, 8).bfloat16(), 2)):
            with LiveBytes() as live:
                exact_kl.decode(made, z, rows=1, mode=mode)
            said = exact_kl.peak_bytes(made, z.shape, rows=1, mode=mode, itemsize=itemsize)
            assert said == pytest.approx(live.peak_bytes, rel=0.15)


# ---- what is refused ------------------------------------------------------------------------------------


def test_what_it_knows() -> None:
    assert exact_kl.supports(vae("narrow")) is None and exact_kl.supports(vae("flux2")) is None
    for name, (build, _) in vaes.SOUND.items():
        why = exact_kl.supports(build())
        assert (why is None) == (name in ("kl", "flux2")), (name, why)


@pytest.mark.parametrize("change", ["conv", "norm", "stride", "block", "decode", "shortcut"])
def test_an_unknown_piece_is_refused(change: str) -> None:
    model = vaes.kl()
    block = model.decoder.up_blocks[0]
    if change == "conv":
        block.resnets[0].conv1 = torch.nn.Conv2d(8, 8, 5, padding=2)
    elif change == "norm":
        block.resnets[0].norm2 = torch.nn.BatchNorm2d(8)
    elif change == "stride":
        block.upsamplers[0].conv.padding_mode = "circular"
    elif change == "block":
        model.decoder.up_blocks[0] = torch.nn.Sequential()
    elif change == "shortcut":
        block.resnets[0].conv_shortcut = torch.nn.Conv2d(8, 8, 3, padding=1)
    else:
        model.__class__ = type("Own", (type(model),), {"_decode": lambda self, z, return_dict=True: z})
    assert "exact strips know" in str(exact_kl.supports(model))


def test_hooks_that_strips_would_pass_by() -> None:
    model = vaes.kl()
    assert exact_kl.standing(model, "decoder") is None
    handle = model.decoder.up_blocks[0].resnets[0].register_forward_hook(lambda *_: None)
    assert "forward hook" in str(exact_kl.standing(model, "decoder"))
    assert exact_kl.standing(model, "encoder") is None
    handle.remove()
    model.decoder.up_blocks[0].resnets[0].forward = lambda *a, **k: None
    assert "was replaced" in str(exact_kl.standing(model, "decoder"))
