"""Exact strips of video autoencoders: the picture of the class itself, in fewer bytes, with nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import diffusers
import pytest
import torch

from diffaccel import InvalidOptionError, UnsupportedModelError
from diffaccel.vae.exact import causal as exact_causal
from diffaccel.vae.exact.causal_cost import Choice, choose_cut
from diffaccel.vae.exact.causal_cuts import gates, reached
from diffaccel.vae.exact.live_bytes import LiveBytes
from diffaccel.vae.exact.replace_input import STUB, ReplaceInput, Untouched
from diffaccel.vae.tiles import strips
from tests.vae import vaes


def hunyuan15() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8), layers_per_block=1, spatial_compression_ratio=4
    )


def ltx2() -> Any:
    """Pads by reflection, unlike the others."""
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=8, block_out_channels=(4, 8, 16), decoder_block_out_channels=(4, 8),
        layers_per_block=(1,) * 4, decoder_layers_per_block=(1,) * 3, down_block_types=("LTX2VideoDownBlock3D",) * 3,
        spatio_temporal_scaling=(True,) * 3, decoder_spatio_temporal_scaling=(True,) * 2,
        downsample_type=("spatial", "spatial", "spatial"), upsample_type=("spatial", "spatial"),
        upsample_residual=(True,) * 2, upsample_factor=(2, 2), decoder_inject_noise=(False,) * 3, patch_size=1,
        spatial_compression_ratio=4,
    )  # fmt: skip


def wan_deep() -> Any:
    """As deep as the real one (two resnets per level, four widths), and narrow."""
    return diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, **vaes.STATS)


BUILD: dict[str, Callable[[], Any]] = {
    "wan": lambda: diffusers.AutoencoderKLWan(**(vaes.WAN | {"base_dim": 8})),
    "wan22": vaes.SOUND["wan22"][0],
    "qwen": lambda: diffusers.AutoencoderKLQwenImage(**(vaes.WAN | {"base_dim": 8})),
    "ltx": vaes.SOUND["ltx"][0],
    "hunyuan15": hunyuan15,
    "ltx2": ltx2,
}
CHANNELS = {"ltx2": 8}
NOT_ENCODED = ("ltx2",)  # this small one decodes at half the scale that it encodes at


def build(name: str) -> Any:
    torch.manual_seed(0)
    return BUILD[name]().eval()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def plain(vae: Any, z: torch.Tensor) -> torch.Tensor:
    picture: torch.Tensor = type(vae).decode(vae, z, return_dict=False)[0]
    return picture


def cut_at(height: int, rows: int, cut: int, axis: int = -2) -> Choice:
    return Choice(cut, axis, tuple(strips(height, rows)), 0, 0)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


# ---- the reach, against pixels that are not numbers -----------------------------------------------------


def spoilt(vae: Any, cut: int) -> tuple[int, int]:
    """How far (lines of the map at the cut, up and down) one line of NaN spreads into the picture."""
    width, middle = 64, 32

    def poison(call: int, x: torch.Tensor) -> torch.Tensor:
        y = x.new_full((*x.shape[:-1], width), 0.5)
        y[..., middle] = torch.nan
        return y

    channels = vae.config.z_dim if hasattr(vae.config, "z_dim") else vae.config.latent_channels
    flags = torch.backends.mkldnn.flags(enabled=False)  # no algorithm that spreads NaN further than the kernel
    with flags, Untouched(vae), ReplaceInput(gates(vae, False)[cut], poison):
        picture = plain(vae, noise(1, channels, 2, STUB, STUB))
    ratio = picture.shape[-1] // width
    columns = picture.isnan().flatten(0, -2).any(0).nonzero().flatten()
    return middle - int(columns.min()) // ratio, int(columns.max()) // ratio - middle


def test_the_halo_of_wan_is_thirteen_latents() -> None:
    """Counted by hand from the layers (13 latents), and the lines that a NaN spreads: neither fewer nor more."""
    vae = wan_deep().eval()
    halos = [reached(vae, cut, False, {}).halo for cut in range(4)]
    assert halos == [(13, 13), (12, 12), (10, 10), (7, 7)]
    assert [spoilt(vae, cut) for cut in range(4)] == halos


@pytest.mark.parametrize("name", ["wan22", "ltx", "hunyuan15", "ltx2"])
def test_no_halo_is_too_small(name: str) -> None:
    vae = build(name)
    for cut in range(len(gates(vae, False))):
        halo, seen = reached(vae, cut, False, {}).halo, max(spoilt(vae, cut))
        assert seen <= halo[0] <= seen + 1 and halo[0] == halo[1], (cut, halo, seen)


# ---- the picture ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("name", sorted(BUILD))
def test_every_cut_decodes_as_plain(name: str, frames: int) -> None:
    """At sizes that divide by nothing, along rows and columns; with a halo too small the picture is another."""
    vae = build(name)
    for axis, size in ((-2, (33, 5)), (-1, (3, 29))):
        z = noise(1, CHANNELS.get(name, 4), frames, *size)
        whole = plain(vae, z)
        for cut in range(len(gates(vae, False))):
            choice = cut_at(size[axis], 11, cut, axis)
            strips_of = exact_causal.decode_strips(vae, z, choice, None, {})
            assert strips_of.shape == whole.shape
            assert (strips_of - whole).abs().max() <= 1e-5, (cut, axis)  # four channels: rounding is large
            if frames == 3 and axis == -2:
                spoilt_by = exact_causal.decode_strips(vae, z, choice, 0, {})
                assert (spoilt_by - whole).abs().max() > 1e-3, "the test shows nothing"


@pytest.mark.parametrize("name", ["wan"])
def test_decode_chooses_a_cut_and_is_bit_equal(name: str) -> None:
    vae = build(name)
    z = noise(2, 4, 2, 33, 3)
    whole, cuts = plain(vae, z), set()
    for mode in exact_causal.MODES:
        for rows in (None, 3, 33):
            assert torch.equal(exact_causal.decode(vae, z, rows=rows, mode=mode), whole), (mode, rows)
            cuts.add(choose_cut(vae, tuple(z.shape), rows or 9, mode, 4, False, {}).cut)
    assert len(cuts) > 1, "nothing was cut"


@pytest.mark.parametrize(
    ("name", "frames"), [("wan", 1), *((name, 9) for name in sorted(set(BUILD) - set(NOT_ENCODED)))]
)
def test_encode_gives_the_moments_of_plain(name: str, frames: int) -> None:
    vae = build(name)
    ratio = vae.spatial_compression_ratio
    rest = 0 if name in ("ltx", "wan22", "hunyuan15") else 3  # these take whole latents only
    for size in ((24 * ratio + rest, ratio), (ratio, 17 * ratio + rest)):
        x = noise(1, 3, frames, *size).clamp(-1, 1)
        moments = type(vae)._encode(vae, x)
        for rows in (2,):
            with LiveBytes() as live:
                got = exact_causal.encode(vae, x, rows=rows, mode="low")
            assert got.shape == moments.shape and (got - moments).abs().max() <= 2e-6, (size, rows)
            shape = tuple(x.shape)
            assert size[0] == ratio or choose_cut(vae, shape, rows, "low", 4, True, {}).cut == 0, "nothing was cut"
            said = exact_causal.peak_bytes(vae, shape, rows=rows, mode="low", encode=True)
            assert live.peak_bytes <= 1.02 * said


def test_bfloat16_weights() -> None:
    vae = build("wan").to(torch.bfloat16)
    z = noise(1, 4, 2, 30, 5).to(torch.bfloat16)
    got = exact_causal.decode(vae, z, rows=8, mode="low")
    assert got.dtype == torch.bfloat16 and (got - plain(vae, z)).abs().max() <= 0.02


def test_the_trained_one() -> None:
    from diffaccel import testbed

    vae = testbed.load("video").vae
    z = noise(1, vae.config.z_dim, 3, 29, 8)
    whole = plain(vae, z)
    assert exact_causal.supports(vae) is None
    assert (exact_causal.decode(vae, z, rows=8, mode="low") - whole).abs().max() <= 1e-6


# ---- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan", "wan22", "ltx"])
def test_it_holds_what_was_said(name: str) -> None:
    vae = build(name)
    shape = (1, 4, 5, 60, 3)
    z = noise(*shape)
    with LiveBytes() as live:
        plain(vae, z)
    said = exact_causal.peak_bytes(vae, shape, rows=60, mode="low")
    assert abs(said / live.peak_bytes - 1) < 0.05, "plain"
    for mode in exact_causal.MODES:
        with LiveBytes() as strip:
            exact_causal.decode(vae, z, rows=8, mode=mode)
        said = exact_causal.peak_bytes(vae, shape, rows=8, mode=mode)
        assert 0.85 * said <= strip.peak_bytes <= said, mode
    assert strip.peak_bytes < 0.8 * live.peak_bytes


def test_where_no_cut_saves_anything_none_is_made() -> None:
    """HunyuanVideo 1.5 attends over all frames at once: with so narrow up blocks that is the peak."""
    vae = build("hunyuan15")
    shape = (1, 4, 5, 60, 3)
    assert choose_cut(vae, shape, 8, "low", 4, False, {}).cut is None
    assert exact_causal.peak_bytes(vae, shape, rows=8, mode="low") == exact_causal.peak_bytes(vae, shape, rows=60)


def test_lower_strips_never_promise_more() -> None:
    vae = build("wan")
    for mode in exact_causal.MODES:
        said = [exact_causal.peak_bytes(vae, (1, 4, 9, 50, 40), rows=rows, mode=mode) for rows in range(1, 51)]
        assert all(a <= b for a, b in pairwise(said)) and said[0] < 0.8 * said[-1]


@pytest.mark.slow
def test_81_frames_at_256_px_within_the_stated_bytes() -> None:
    vae = diffusers.AutoencoderKLWan(base_dim=16).eval()
    shape = (1, 16, 21, 32, 32)
    with LiveBytes() as live:
        picture = exact_causal.decode(vae, noise(*shape), rows=8, mode="low")
    assert picture.shape == (1, 3, 81, 256, 256)
    said = exact_causal.peak_bytes(vae, shape, rows=8, mode="low")
    assert 0.85 * said <= live.peak_bytes <= said


# ---- refusals and what stays behind ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hunyuan", "cogvideox"])
def test_norms_over_the_whole_map_are_refused(name: str) -> None:
    vae = vaes.SOUND[name][0]()
    why = exact_causal.supports(vae)
    assert why is not None and "norms of its up blocks take their statistics over the whole map" in why
    with pytest.raises(UnsupportedModelError, match="group norm"):
        reached(vae, 0, False, {})


def test_what_is_not_known_is_refused() -> None:
    assert "not a mid block" in str(exact_causal.supports(vaes.dc()))
    vae = build("wan")
    vae.__class__ = type("AutoencoderKLStrange", (type(vae),), {})
    assert "not been tested" in str(exact_causal.supports(vae))
    vae = build("ltx")
    vae.decoder.up_blocks[0].compile(backend="eager")
    assert "compiled" in str(exact_causal.supports(vae))
    vae = build("ltx")
    vae.decoder.conv_out.register_forward_hook(lambda *args: None)
    assert "carries a forward hook" in str(exact_causal.supports(vae))


def test_offload_within_the_vae_is_refused() -> None:
    """Hooks would fetch the weights for every frame of every strip; and a run for sizes must not move them."""
    vae = build("ltx")
    vae.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    assert "offload" in str(exact_causal.supports(vae))


def test_noise_of_the_size_of_the_map_is_refused() -> None:
    vae = build("ltx")
    resnet = vae.decoder.up_blocks[3].resnets[0]
    resnet.per_channel_scale1 = torch.nn.Parameter(torch.zeros(8, 1, 1))
    assert "random numbers" in str(exact_causal.supports(vae))


@pytest.mark.parametrize("name", ["wan", "hunyuan15"])
def test_nothing_is_left_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = build(name)
    vae.use_tiling = True
    before = dict(vars(vae))
    z = noise(1, 4, 2, 41, 5)
    given = z.clone()
    exact_causal.supports(vae)
    exact_causal.decode(vae, z, rows=5, mode="low")
    assert torch.equal(z, given)
    conv_out, calls = vae.decoder.conv_out, []

    def stop(*args: Any) -> Any:
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(conv_out, "forward", stop)
    with pytest.raises(KeyboardInterrupt):
        exact_causal.decode(vae, z, rows=5, mode="low")
    assert calls and vars(vae) == before and vae.use_tiling
    assert not any(module._forward_pre_hooks for module in vae.modules())


def test_another_thread_decodes_as_ever() -> None:
    vae = build("ltx")
    z = noise(1, 4, 2, 9, 6)
    whole, seen = plain(vae, z), []

    def elsewhere() -> None:
        with torch.no_grad():
            seen.append(plain(vae, z))

    with ReplaceInput(vae.decoder.up_blocks[0], lambda call, x: torch.zeros_like(x)):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        here = plain(vae, z)
    assert torch.equal(seen[0], whole) and not torch.equal(here, whole)


@pytest.mark.parametrize(("given", "meant"), [({"rows": 0}, "rows=0"), ({"mode": "quick"}, "fast, low")])
def test_bad_input(given: dict[str, Any], meant: str) -> None:
    vae = build("ltx")
    with pytest.raises(InvalidOptionError, match=meant):
        exact_causal.decode(vae, noise(1, 4, 1, 9, 9), **given)
