"""Arithmetic of cutting a map: strips of rows with what they need of their neighbours, and overlapping tiles.

Plain numbers, no tensors. Rows are half-open ranges [first, end) of a map of `height` rows. A range with its halo is
clipped to the map: where it ends at the map's edge the layer's own zero padding is right, and where it does not the
rows that the padding spoilt are cut off again.

Tiles are those of diffusers' autoencoders. An autoencoder cuts latents into tiles that start a stride apart, decodes
each, and keeps the first `keep` pixels of each. The picture has its right size only where `keep` is the stride times
the compression ratio; diffusers rounds both with `int` and checks nothing (huggingface/diffusers#13605).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Rows = tuple[int, int]


def strips(height: int, rows: int) -> list[Rows]:
    """`height` rows in as few strips of at most `rows` as possible, all nearly of one height."""
    count = -(-height // rows)
    edges = [height * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def tallest(height: int, rows: int) -> int:
    """Rows of the tallest of these strips."""
    count = -(-height // rows)
    return -(-height // count)


def with_halo(rows: Rows, reach: int, height: int) -> Rows:
    """The rows that a layer reaching `reach` rows up and down needs for these rows of its output (stride 1)."""
    return max(rows[0] - reach, 0), min(rows[1] + reach, height)


def below_doubling(rows: Rows, height: int) -> Rows:
    """The rows before a doubling (nearest) that hold these rows after it; `height` is that before."""
    return max(rows[0] // 2, 0), min(-(-rows[1] // 2), height)


def below_halving(rows: Rows, height: int) -> Rows:
    """The rows that a 3x3 convolution of stride 2, padded below by one row only, needs for these of its output."""
    return 2 * rows[0], min(2 * rows[1] + 1, height)


def halved(size: int) -> int:
    """Rows (or columns) behind such a convolution."""
    return size // 2


# ---- overlapping tiles ------------------------------------------------------------------------------------------


def overlap_fits(tile: int, ratio: int, overlap: float) -> bool:
    """Do tiles of `tile` latents at this overlap (0 <= overlap < 1) give the right size, decoding and encoding?"""
    sample = tile * ratio
    stride, sample_stride = int(tile * (1 - overlap)), int(sample * (1 - overlap))
    keep, sample_keep = tile - int(tile * overlap), sample - int(sample * overlap)
    return stride >= 1 and sample_keep == stride * ratio and keep * ratio == sample_stride


def overlaps(tile: int, ratio: int) -> list[float]:
    """Every overlap, one per stride of 1 to `tile` latents, that gives the right size; most overlap first."""
    found = []
    for stride in range(1, tile + 1):
        exact = (tile - stride) / tile
        for value in (exact, math.nextafter(exact, 1), math.nextafter(exact, 0)):
            if 0 <= value < 1 and overlap_fits(tile, ratio, value) and int(tile * (1 - value)) == stride:
                found.append(value)
                break
    return found


def nearest_overlap(axes: Sequence[tuple[int, int]], wanted: float) -> float:
    """The overlap nearest to `wanted` that gives the right size on every axis, each (tile in latents, ratio)."""
    if all(overlap_fits(tile, ratio, wanted) for tile, ratio in axes):
        return wanted
    candidates = {value for tile, ratio in axes for value in overlaps(tile, ratio)}
    fitting = [value for value in candidates if all(overlap_fits(t, r, value) for t, r in axes)]
    return min(fitting, key=lambda value: (abs(value - wanted), -value))  # no overlap at all always fits


def multiple(value: float, ratio: int) -> int:
    """The multiple of `ratio` at or below `value`, at least `ratio`."""
    return max(ratio, int(value // ratio) * ratio)
