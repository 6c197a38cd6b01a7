"""What the masks share: where the text lies, even blocks over all tokens, tiles of the video, and a search."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..geometry import Geometry
from ..plan import BlockPlan, Blocks, HeadPlans

Three = tuple[int, int, int]  # (frames, rows, columns)

BLOCK = 128  # tokens of a block where nothing else is said


def full(tokens: int, block: int = BLOCK) -> HeadPlans:
    """The plan that keeps everything, for all heads: kernels see that it is dense."""
    blocks = Blocks.even(tokens, block)
    return HeadPlans((BlockPlan.of_mask(torch.ones(blocks.count, blocks.count, dtype=torch.bool), blocks, blocks),))


def video_start(geometry: Geometry) -> int:
    """Position of the first video token."""
    return geometry.text if geometry.text_first else 0


def spans(geometry: Geometry, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last video token (counted within the video) of every even block: two [blocks] int64.

    A block of text only has last < first.
    """
    begin = torch.arange(0, geometry.tokens, block) - video_start(geometry)
    end = (begin + block - 1).clamp_(max=geometry.video - 1)
    return begin.clamp_(min=0), end


def dense_text(kept: torch.Tensor, geometry: Geometry, block: int) -> torch.Tensor:
    """Make every even block with a text token a dense row and a dense column, in place."""
    if geometry.text:
        start = 0 if geometry.text_first else geometry.video
        touched = slice(start // block, -(-(start + geometry.text) // block))
        kept[touched] = True
        kept[:, touched] = True
    return kept


def around_text(geometry: Geometry, lengths: torch.Tensor, order: torch.Tensor, block: int) -> tuple[Blocks, slice]:
    """Blocks of all tokens from those of the video alone, the text in even blocks of its own where it stands.

    Args:
        lengths: [video blocks] tokens of each; order: [video] int64, video tokens in block order, from 0.

    Returns:
        (blocks, the slice of block indices that are video).
    """
    text = Blocks.even(geometry.text, block).starts.diff() if geometry.text else torch.zeros(0, dtype=torch.int32)
    start = video_start(geometry)
    words = torch.arange(geometry.text) + (0 if geometry.text_first else geometry.video)
    both = [lengths.to(torch.int32), text]
    tokens = [order + start, words]
    if geometry.text_first:
        both.reverse()
        tokens.reverse()
    starts = torch.zeros(len(lengths) + len(text) + 1, dtype=torch.int32)
    starts[1:] = torch.cat(both).cumsum(0)
    first = len(text) if geometry.text_first else 0
    return Blocks(starts, torch.cat(tokens)), slice(first, first + len(lengths))


def framed(kept: torch.Tensor, blocks: int, video: slice) -> torch.Tensor:
    """[blocks, blocks] map with `kept` over the video's blocks and text rows and columns dense."""
    whole = torch.ones(blocks, blocks, dtype=torch.bool)
    whole[video, video] = kept
    return whole


def video_share(geometry: Geometry, density: float) -> float:
    """Density left for video x video once text rows and columns are dense (at least 0)."""
    n, v = geometry.tokens**2, geometry.video**2
    return max(0.0, (density * n - (n - v)) / v)


def density_of(kept: torch.Tensor, tokens: int, block: int) -> float:
    """Kept pairs of tokens over all pairs, of a map over even blocks (as `BlockPlan.density`, without the plan)."""
    lengths = Blocks.even(tokens, block).starts.diff().float()
    return float((lengths @ kept.float()).double() @ lengths.double()) / tokens**2


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest integer in [low, high] that fits, `fits` being true up to some point; `low` if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
