"""Top-k blocks by pooled scores: a block of queries sees the k blocks of keys whose means answer its mean best.

This is the "fine" branch of video sparse attention (Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse
Attention", 2025). Its coarse branch hangs on a trained gate, and without one does harm: it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar

import torch

from ..geometry import Geometry
from ..plan import BlockPlan, Blocks, HeadPlans
from .layout import BLOCK, Three, framed, full, video_share
from .method import Query
from .options import COUNT, SHARE, THREE, either, take
from .sta import choose_tile, grid_of, tiles


def pooled(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[B, H, blocks, D] float32: mean of the tokens of every block, by true lengths. x: [B, H, N, D]."""
    lengths, home = blocks.starts.diff().long(), blocks.block_of_token()
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


def top_block_plans(
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


# ---- the config -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopBlocks:
    """Top-k tiles by pooled scores, per head and call.

    Attributes:
        density: finds k. With neither: 0.25.
        count: key blocks a query block sees, instead of density.
        tile: tokens (frames, rows, columns); None: chosen for the grid, at most `block` tokens.
        block: tokens.
    """

    density: float | None = None
    count: int | None = None
    tile: Three | None = None
    block: int = BLOCK

    name: ClassVar[str] = "topk"
    static: ClassVar[bool] = False

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density")
        take(self, COUNT.or_none(), "count")
        take(self, THREE.or_none(), "tile")
        either(self.density, "count", self.count)
        take(self, COUNT, "block")

    def plan(self, query: Query) -> HeadPlans:
        """A plan for every head of the batch."""
        if self.density == 1.0:
            return full(query.geometry.tokens, self.block)
        q, k = query.tensors(self.name)
        density = 0.25 if self.density is None and self.count is None else self.density
        return top_block_plans(
            query.geometry, q, k, density=density, count=self.count, block=self.block, tile=self.tile
        )

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{tile, grid, count}."""
        tile = self.tile or choose_tile(geometry, self.block)
        grid = grid_of(geometry, tile)
        density = 0.25 if self.density is None else self.density
        count = self.count or count_for(geometry, density, prod(grid))
        return {"tile": tile, "grid": grid, "count": count}
