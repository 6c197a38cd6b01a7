"""Top-k blocks by pooled scores: a block of queries sees the k blocks of keys whose means answer its mean best.

This is the "fine" branch of video sparse attention (Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse
Attention", 2025). Its coarse branch hangs on a trained gate, and without one does harm: it is left out.
"""

from __future__ import annotations

from math import ceil

import torch

from ..geometry import Geometry
from ..plan import BlockPlan, Blocks, HeadPlans
from .layout import BLOCK, framed, video_share
from .sta import Three, tiles


def pooled(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[B, H, blocks, D] float32: mean of the tokens of every block, by true lengths. x: [B, H, N, D]."""
    lengths = blocks.starts.diff().long()
    home = torch.repeat_interleave(torch.arange(blocks.count), lengths)
    if blocks.order is not None:
        home = torch.empty_like(home).index_put_((blocks.order.cpu(),), home)
    sums = x.new_zeros(*x.shape[:2], blocks.count, x.shape[-1], dtype=torch.float32)
    sums.index_add_(2, home.to(x.device), x.float())
    return sums / lengths.to(x.device)[:, None]


def count_for(geometry: Geometry, density: float, blocks: int) -> int:
    """How many of the video's key blocks a row keeps: max(1, ceil(density * blocks)), text taken off first."""
    return max(1, min(blocks, ceil(video_share(geometry, density) * blocks - 1e-9)))


def top_blocks(q: torch.Tensor, k: torch.Tensor, count: int) -> torch.Tensor:
    """[..., rows, columns] boolean: the `count` best columns of each row. q, k: [..., blocks, D] block means."""
    scores = q @ k.transpose(-1, -2)  # the scale does not change an order
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count, -1).indices, True)


def plans_of(
    geometry: Geometry,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    density: float | None = None,
    count: int | None = None,
    block: int = BLOCK,
    tile: Three | None = None,
) -> HeadPlans:
    """A plan for every head from q, k [B, H, N, D]: the video in tiles of at most `block` tokens, text dense.

    Args:
        count: key blocks a row; None: from `density`.
    """
    blocks, video = tiles(geometry, block, tile)
    number = video.stop - video.start
    if count is None:
        count = count_for(geometry, 1.0 if density is None else density, number)
    means = [pooled(x, blocks)[:, :, video] for x in (q, k)]
    kept = top_blocks(means[0], means[1], min(count, number)).flatten(0, 1).cpu()
    plans = tuple(BlockPlan.of_mask(framed(each, blocks.count, video), blocks, blocks) for each in kept)
    return HeadPlans(plans, torch.arange(len(plans)).view(q.shape[:2]))
