"""Sliding tile attention: the video is cut into tiles, and a tile sees the tiles in a window around it.

Zhang et al., "Fast Video Generation with Sliding Tile Attention" (2025). Per axis with n tiles and a window of k
tiles, h = k // 2: the window's centre is min(max(q, h), n - 1 - h), so that border tiles see as many as inner ones.
An even k therefore covers 2 * (k // 2) + 1 tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Any, ClassVar

import torch

from ..geometry import Geometry
from ..plan import BlockPlan, Blocks, HeadPlans
from .layout import BLOCK, Three, around_text, framed, full, video_share
from .method import Query, kept
from .options import COUNT, SHARE, THREE, either, take


def _surface(tile: Three) -> int:
    t, h, w = tile
    return t * h + h * w + w * t


def choose_tile(geometry: Geometry, block: int = BLOCK) -> Three:
    """The tile (frames, rows, columns) of at most `block` tokens.

    Among tiles that divide the grid exactly: the most compact one of those within a tenth of the largest. Where no
    such tile fills half a block (nor the whole video): a ragged one, that leaves the fewest tiles.
    """
    f, r, c = geometry.frames, geometry.rows, geometry.columns
    exact = [
        (t, h, w)
        for t, h, w in product(_divisors(geometry.frames), _divisors(geometry.rows), _divisors(geometry.columns))
        if t * h * w <= block
    ]
    most = max(map(prod, exact))
    if 2 * most >= min(block, 2 * geometry.video):
        return min((t for t in exact if 10 * prod(t) >= 9 * most), key=lambda t: (_surface(t), t))
    every = [
        (t, h, min(c, block // (t * h))) for t in range(1, min(f, block) + 1) for h in range(1, min(r, block // t) + 1)
    ]
    fewest = min(prod(grid_of(geometry, t)) for t in every)
    return min((t for t in every if 10 * prod(grid_of(geometry, t)) <= 11 * fewest), key=lambda t: (_surface(t), t))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def grid_of(geometry: Geometry, tile: Three) -> Three:
    """Tiles along each axis, the last one of an axis ragged where the tile does not divide it."""
    f, h, w = (ceil(n / t) for n, t in zip((geometry.frames, geometry.rows, geometry.columns), tile, strict=True))
    return f, h, w


def tile_order(geometry: Geometry, tile: Three) -> tuple[torch.Tensor, torch.Tensor]:
    """(order [video] int64: the token at each position, tile by tile in raster order; lengths [tiles])."""
    f, h, w = (
        torch.arange(n) // t for n, t in zip((geometry.frames, geometry.rows, geometry.columns), tile, strict=True)
    )
    _, gh, gw = grid_of(geometry, tile)
    home = ((f[:, None, None] * gh + h[None, :, None]) * gw + w[None, None]).flatten()
    return home.argsort(stable=True), home.bincount()


def axis_map(count: int, window: int) -> torch.Tensor:
    """[count, count] boolean: which tiles of one axis a tile sees."""
    half, place = window // 2, torch.arange(count)
    centre = torch.minimum(place.clamp(min=half), torch.tensor(count - 1 - half))
    return (centre[:, None] - place[None]).abs() <= half


def tile_map(grid: Three, window: Three) -> torch.Tensor:
    """[tiles, tiles] boolean map of tiles in raster order."""
    t, h, w = (axis_map(n, k).to(torch.uint8) for n, k in zip(grid, window, strict=True))
    return torch.kron(torch.kron(t, h), w).bool()


def choose_window(geometry: Geometry, tile: Three, density: float) -> Three:
    """The odd window for at most `density` of the pairs; (1, 1, 1) where even that is more.

    Of the windows that keep nearly (at least 0.8 of) the most, the one nearest to a cube, counted in tokens.
    """
    grid, allowed = grid_of(geometry, tile), video_share(geometry, density)
    axes = (geometry.frames, geometry.rows, geometry.columns)
    shares = {
        window: prod(min(k, n) / n for k, n in zip(window, grid, strict=True))
        for window in product(*(range(1, n + 2, 2) for n in grid))
    }
    most = max((share for share in shares.values() if share <= allowed + 1e-9), default=0.0)
    best = (0.0, 0.0, (1, 1, 1))
    for window, share in shares.items():
        if 0.8 * most <= share <= allowed + 1e-9:
            t, h, w = (min(k * m, n) for k, m, n in zip(window, tile, axes, strict=True))
            cube = (t * h * w) ** (2 / 3) / _surface((t, h, w))
            best = max(best, (round(cube, 6), share, (window[0], window[1], window[2])))
    return best[2]


def tile_plan(geometry: Geometry, *, tile: Three, window: Three, block: int = BLOCK) -> BlockPlan:
    """The plan over tiles; text in blocks of `block` tokens, dense."""
    order, lengths = tile_order(geometry, tile)
    blocks, video = around_text(geometry, lengths, order, block)
    return BlockPlan.of_mask(framed(tile_map(grid_of(geometry, tile), window), blocks.count, video), blocks, blocks)


def tiles(geometry: Geometry, block: int = BLOCK, tile: Three | None = None) -> tuple[Blocks, slice]:
    """Blocks of all tokens with the video in tiles, and which of them are video."""
    order, lengths = tile_order(geometry, tile or choose_tile(geometry, block))
    return around_text(geometry, lengths, order, block)


# ---- the config -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlidingTile:
    """Sliding tile attention: a window of tiles around each tile. Static.

    Attributes:
        density: finds the window: the one that keeps the most within it. With neither: 0.2.
        window: tiles (frames, rows, columns), instead of density.
        tile: tokens (frames, rows, columns); None: chosen for the grid, at most `block` tokens.
        block: tokens.
    """

    density: float | None = None
    window: Three | None = None
    tile: Three | None = None
    block: int = BLOCK

    name: ClassVar[str] = "sta"
    static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density")
        take(self, THREE.or_none(), "window", "tile")
        either(self.density, "window", self.window)
        take(self, COUNT, "block")

    def _shape(self, geometry: Geometry) -> tuple[Three, Three]:
        tile = self.tile or choose_tile(geometry, self.block)
        density = 0.2 if self.density is None else self.density
        return tile, self.window or choose_window(geometry, tile, density)

    def plan(self, query: Query) -> HeadPlans:
        """One plan for all heads."""
        return kept(self, query.geometry)

    def build(self, geometry: Geometry) -> HeadPlans:
        """The plan, made anew."""
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        tile, window = self._shape(geometry)
        return HeadPlans((tile_plan(geometry, tile=tile, window=window, block=self.block),))

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{tile, grid, window, density}."""
        tile, window = self._shape(geometry)
        grid = grid_of(geometry, tile)
        return {"tile": tile, "grid": grid, "window": window, "density": kept(self, geometry).density}
