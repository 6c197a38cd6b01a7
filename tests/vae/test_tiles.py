"""The arithmetic of tiles against diffusers' own tiled decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel.vae.layout import Sizes, tiling
from diffaccel.vae.tiles import multiple, nearest_overlap, overlap_fits, overlaps
from tests import tiny

SQUARE = {"tile_sample_min_size": 64, "tile_latent_min_size": 8, "tile_overlap_factor": 0.25}
STRIDES = {
    "tile_sample_min_height": 256, "tile_sample_min_width": 256,
    "tile_sample_stride_height": 192, "tile_sample_stride_width": 192,
}  # fmt: skip


def comes_out_right(vae: Any) -> bool:
    """Does diffusers give 28 pixels for 14 latents, and 14 latents for 28 pixels?"""
    try:
        with torch.no_grad():
            decoded = vae.decode(torch.zeros(1, 4, 14, 14)).sample
            encoded = vae.encode(torch.zeros(1, 3, 28, 28)).latent_dist.mean
    except RuntimeError:  # a rest of one pixel, which cannot be halved
        return False
    return bool(decoded.shape[-1] == 28 and encoded.shape[-1] == 14)


@pytest.mark.parametrize("overlap", [0.0, 0.2, 0.25, 0.5])
def test_fits_exactly_where_diffusers_returns_the_right_size(overlap: float) -> None:
    vae = tiny._kl(4, 2, shift=True).eval()
    vae.enable_tiling()
    vae.tile_overlap_factor = overlap
    verdicts = set()
    for tile in range(4, 13):
        vae.tile_latent_min_size, vae.tile_sample_min_size = tile, 2 * tile
        right = comes_out_right(vae)
        assert overlap_fits(tile, 2, overlap) is right, tile
        verdicts.add(right)
    assert verdicts == ({True} if overlap == 0 else {True, False}), "the test shows nothing"


def test_the_known_wrong_size_is_moved() -> None:
    """Diffusers 0.42.1: 20x20 latents, tile 10, overlap 0.25 gave 168 px instead of 160."""
    assert not overlap_fits(10, 8, 0.25)
    moved = nearest_overlap([(10, 8)], 0.25)
    assert overlap_fits(10, 8, moved) and abs(moved - 0.25) <= 0.1
    assert nearest_overlap([(8, 8)], 0.25) == 0.25, "a sound one stays"
    both = nearest_overlap([(10, 8), (16, 8)], 0.25)
    assert overlap_fits(10, 8, both) and overlap_fits(16, 8, both)


def test_no_overlap_always_fits() -> None:
    for tile in range(1, 200):
        assert overlap_fits(tile, 8, 0.0) and 0.0 in overlaps(tile, 8)


def test_multiple() -> None:
    assert [multiple(v, 8) for v in (1, 8, 15.9, 16)] == [8, 8, 8, 16]


def test_given_sizes_are_taken_or_refused() -> None:
    made = tiling(STRIDES, 8, Sizes((128, None), (None, 128)))
    assert made is not None and made.tile == (128, 256) and made.stride == (96, 128), "a share of overlap is kept"
    for sizes, meant in (
        (Sizes((100, None)), "96 or 104"),
        (Sizes((4, None)), "8 or 16"),
        (Sizes(stride=(None, 264)), "more than the tile"),
        (Sizes(stride=(20, None)), "16 or 24"),
    ):
        with pytest.raises(ValueError, match=meant):
            tiling(STRIDES, 8, sizes)
    with pytest.raises(ValueError, match="square"):
        tiling(SQUARE, 8, Sizes((32, 64)))
    with pytest.raises(ValueError, match="same share"):
        tiling(SQUARE, 8, Sizes((64, None), (32, 48)))
    with pytest.raises(ValueError, match="fixed"):
        tiling({"kernel": (24, 320, 320)}, 8, Sizes((64, None)))
    assert tiling({"kernel": (24, 320, 320)}, 8, Sizes()) is None


def test_the_classes_own_unsound_sizes_are_moved_with_a_note() -> None:
    made = tiling(SQUARE | {"tile_sample_min_size": 84, "tile_latent_min_size": 10}, 8, Sizes())
    assert made is not None and made.tile == (80, 80)
    assert made.settings["tile_latent_min_size"] == 10 and len(made.notes) == 2
    made = tiling(STRIDES | {"tile_sample_stride_width": 100}, 8, Sizes())
    assert made is not None and made.stride == (192, 96) and "100 -> 96" in made.notes[0]
    sound = tiling(STRIDES, 8, Sizes())
    assert sound is not None and sound.notes == () and sound.settings == STRIDES
