"""Tiles along time behind one pair of options: videos of the right length, refusals where they cannot act, undo."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from diffaccel import InvalidOptionError, attach, plan, restore
from diffaccel.models.vae import VAES
from diffaccel.vae.blended.frames import frame_tiling
from diffaccel.vae.layout import compression
from tests.vae import vaes
from tests.vae.test_blended import flux_with, tile_state


def magvit() -> Any:
    return diffusers.AutoencoderKLMagvit(
        latent_channels=4, block_out_channels=[8, 8, 8, 8], layers_per_block=1, norm_num_groups=4
    )


# name -> (builder, frames per latent frame, (tile, stride) of each try)
VIDEO: dict[str, tuple[Any, int, list[tuple[int, int | None]]]] = {
    "hunyuan": (vaes.hunyuan, 4, [(16, 12), (8, None)]),
    "ltx": (vaes.ltx, 4, [(16, 8), (8, 4)]),
    "cogvideox": (vaes.cogvideox, 4, [(16, None), (24, 24)]),
    "magvit": (magvit, 4, [(8, None), (12, None)]),
}


def slow(*shape: int) -> torch.Tensor:
    """A picture that changes by a little from the first frame to the last."""
    generator = torch.Generator().manual_seed(0)
    first, last = (torch.randn(*shape[:2], 1, *shape[3:], generator=generator) for _ in range(2))
    return first + 0.05 * last * torch.linspace(0, 1, shape[2])[None, None, :, None, None]


def psnr_db(picture: torch.Tensor, reference: torch.Tensor) -> float:
    span, error = reference.max() - reference.min(), (picture - reference).square().mean().sqrt()
    return float(20 * torch.log10(span / error))


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", sorted(VIDEO))
def test_every_length_comes_out_right(name: str) -> None:
    """Decoded and encoded, at lengths that no tile divides.

    A slow video of 17 frames stays more than 35 dB from untiled at HunyuanVideo's own size and in batches (C55). With
    these random weights smaller tiles, longer videos (norms over time) and LTX's (one frame late) do not.
    """
    make, ratio, tries = VIDEO[name]
    torch.manual_seed(0)
    vae = make().eval()
    pipe = attach(flux_with(vae))
    before = tile_state(vae)
    untiled = {key: False for key in vars(vae) if key.startswith("use_framewise_")}
    for latents in (1, 3, 5, 9):
        z = slow(1, 4, latents, 2, 2)
        side = 2 * compression(vae)
        x = slow(1, 3, (latents - 1) * ratio + 1, side, side)
        vars(vae).update(untiled)
        picture, moments = vae.decode(z).sample, vae.encode(x).latent_dist.mean
        vars(vae).update({key: dict(before)[key] for key in untiled})
        for tile, stride in tries:
            pipe.enable_vae_tiling(tile_frames=tile, stride_frames=stride)
            got, encoded = vae.decode(z).sample, vae.encode(x).latent_dist.mean
            assert got.shape == picture.shape and encoded.shape == moments.shape, (latents, tile)
            assert got.shape[2] == (latents - 1) * ratio + 1
            if latents == 5 and name != "ltx" and tile != 8:
                assert psnr_db(got, picture) > 35 and psnr_db(encoded, moments) > 35, tile
            if latents == 9 and name != "magvit":
                assert not torch.equal(got, picture), "nothing was cut"
            pipe.disable_vae_tiling()
            assert tile_state(vae) == before


def test_the_blend_of_encoded_tiles_is_counted_in_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: 1x3x17xHxW, tile 16/12 of ratio 4 overlaps by one latent, not by four."""
    vae, seen = vaes.hunyuan().eval(), []
    attach(flux_with(vae)).enable_vae_tiling(tile_frames=16, stride_frames=12)
    blend = type(vae).blend_t
    monkeypatch.setattr(
        type(vae), "blend_t", lambda self, a, b, extent: seen.append(extent) or blend(self, a, b, extent)
    )
    assert vae.encode(torch.zeros(1, 3, 17, 8, 8)).latent_dist.mean.shape[2] == 5
    assert seen == [1]
    vae.decode(torch.zeros(1, 4, 5, 1, 1))
    assert seen == [1, 4], "decoded tiles overlap by frames"


def ltx2() -> Any:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4, patch_size=1,
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False),
        decoder_inject_noise=(False,) * 4, downsample_type=("conv",) * 4, upsample_residual=(False,) * 3,
        upsample_factor=(1,) * 3,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("make", [vaes.ltx, ltx2])
def test_ltx_tiles_are_joined_where_they_belong(make: Any, batch: int, dtype: torch.dtype) -> None:
    """F14. Negative control: diffusers' own tiles fit better to the untiled video moved by one frame; ours do not."""
    torch.manual_seed(0)
    vae = make().eval().to(dtype)
    ratio = vae.temporal_compression_ratio
    ends = torch.randn(batch, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    z = torch.nn.functional.interpolate(ends, size=(9, 4, 4), mode="trilinear", align_corners=True).to(dtype)
    whole = vae.decode(z).sample.float()
    first = 2 * ratio + 2  # behind the first tile
    vae.use_framewise_decoding, vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = (
        True, 4 * ratio, 2 * ratio,
    )  # fmt: skip
    own = vae.decode(z).sample.float()
    vae.use_framewise_decoding = False
    late = psnr_db(own[:, :, first:], whole[:, :, first:])
    assert psnr_db(own[:, :, first:], whole[:, :, first - 1 : -1]) > late + 1
    pipe = attach(flux_with(vae)).enable_vae_tiling(tile_frames=4 * ratio, stride_frames=2 * ratio)
    assert "joined where they belong" in pipe.acceleration.plan.item("vae.tiling").reason
    tiled = vae.decode(z).sample.float()
    assert tiled.shape == whole.shape and torch.equal(tiled[:, :, : 2 * ratio], own[:, :, : 2 * ratio])
    there, moved = (psnr_db(tiled[:, :, first:], part) for part in (whole[:, :, first:], whole[:, :, first - 1 : -1]))
    assert there > moved + 1 and there > late + 1
    restore(pipe)
    vae.use_framewise_decoding, vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = (
        True, 4 * ratio, 2 * ratio,
    )  # fmt: skip
    assert torch.equal(vae.decode(z).sample.float(), own) and "_temporal_tiled_decode" not in vars(vae)


@pytest.mark.parametrize("name", ["wan", "qwen", "kl", "hunyuan15"])
def test_what_cannot_act_is_an_error(name: str) -> None:
    makers = {key: make for key, (make, _) in vaes.SOUND.items()}
    makers["hunyuan15"] = lambda: diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8), layers_per_block=1, spatial_compression_ratio=4
    )
    vae = makers[name]()
    pipe = attach(flux_with(vae))
    before = tile_state(vae)
    meant = {"kl": "no tiles along time", "hunyuan15": "all frames at once"}.get(name, "by definition")
    with pytest.raises(InvalidOptionError, match=rf"tile_frames=16: .*{meant}"):
        pipe.enable_vae_tiling(tile_frames=16)
    assert tile_state(vae) == before
    item = plan(pipe, None, vae_tiling="blended", vae_tiling_tile_frames=16).item("vae.tiling")
    assert item.status == "skipped" and meant in item.reason
    pipe.enable_vae_tiling()
    assert vae.use_tiling
    restore(pipe)


@pytest.mark.parametrize(
    ("name", "sizes", "meant"),
    [
        ("hunyuan", {"tile_frames": 18}, "multiple of 4 .*16 or 20"),
        ("hunyuan", {"tile_frames": 3}, "4 or 8"),
        ("hunyuan", {"tile_frames": 8, "stride_frames": 12}, "frames would be missing"),
        ("hunyuan", {"stride_frames": 6}, "4 or 8"),
        ("hunyuan", {"tile_frames": 0}, "whole number of frames"),
        ("cogvideox", {"tile_frames": 4}, "multiple of 8 .*2 latent frames.*8 or 16"),
        ("cogvideox", {"tile_frames": 16, "stride_frames": 8}, "do not overlap"),
    ],
)
def test_bad_sizes(name: str, sizes: dict[str, Any], meant: str) -> None:
    vae = vaes.SOUND[name][0]()
    pipe = attach(flux_with(vae))
    before = tile_state(vae)
    with pytest.raises(InvalidOptionError, match=meant):
        pipe.enable_vae_tiling(**sizes)
    assert tile_state(vae) == before


def test_a_single_latent_per_batch_would_lose_frames() -> None:
    """Negative control of the multiple of two: CogVideoX makes one frame of each latent frame that comes alone."""
    vae = vaes.cogvideox().eval()
    vae.num_latent_frames_batch_size = 1
    assert vae.decode(torch.zeros(1, 4, 3, 2, 2)).sample.shape[2] == 3


def test_unsound_sizes_of_the_class_are_moved() -> None:
    own = {
        "tile_sample_min_num_frames": 18, "tile_sample_stride_num_frames": 10,
        "use_framewise_decoding": True, "use_framewise_encoding": True,
    }  # fmt: skip
    made = frame_tiling(VAES["AutoencoderKLHunyuanVideo"], own, 4, None, None)
    assert made.settings == {"tile_sample_min_num_frames": 16, "tile_sample_stride_num_frames": 8}
    assert len(made.notes) == 1 and "18 -> 16" in made.notes[0]
    off = own | {"use_framewise_decoding": False, "use_framewise_encoding": False}
    assert frame_tiling(VAES["AutoencoderKLHunyuanVideo"], off, 4, None, None).settings == {}


def test_a_short_picture_of_many_frames_counts_as_tiled() -> None:
    vae = vaes.hunyuan().eval()
    pipe = attach(flux_with(vae)).enable_vae_tiling(tile_frames=8)
    with pipe.acceleration.run():
        vae.decode(torch.zeros(1, 4, 5, 1, 1))
    assert pipe.acceleration.report.stats["vae.tiling"] == {"decodes": 1, "tiled": 1}
    with pipe.acceleration.run():
        vae.decode(torch.zeros(1, 4, 2, 1, 1))
    assert pipe.acceleration.report.stats["vae.tiling"] == {"decodes": 1, "tiled": 0}


def test_every_class_of_the_table_exists() -> None:
    assert all(hasattr(diffusers, name) or hasattr(diffusers.models.autoencoders, name) for name in VAES)
