"""Methods whose plan depends on the geometry alone: radial attention and sliding tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...core.options import BOOLEAN
from ..geometry import Geometry
from ..plan import HeadPlans
from . import radial, sta
from .layout import BLOCK, full
from .method import COUNT, POSITIVE, SHARE, THREE, Recommended, either, kept, one_of, take


@dataclass(frozen=True)
class Radial:
    """Radial attention (masks/radial.py): bands that narrow with the distance of frames. Static.

    Attributes:
        density: finds the decay. Neighbouring frames and the sink are always whole, so short videos have a least one.
        decay: the paper's gamma, instead of density. With neither: 1.0.
        shrink: "strict" (the reference's rule for blocks) or "any" (every block with a kept pair).
        sink: all see frame 0; None: as the family has it.
        threshold: bands narrower than this drop frames; None: the block.
        block: tokens.
    """

    density: float | None = None
    decay: float | None = None
    shrink: radial.Shrink = "strict"
    sink: bool | None = None
    threshold: int | None = None
    block: int = BLOCK

    name: ClassVar[str] = "radial"
    static: ClassVar[bool] = True
    recommended: ClassVar[Recommended] = Recommended(0.24, 1, "reference scripts, Wan2.1 69 frames: 12 of 50 steps")

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density")
        take(self, POSITIVE.or_none(), "decay")
        either(self.density, "decay", self.decay)
        one_of("shrink", self.shrink, ("any", "strict"))
        take(self, BOOLEAN.or_none(), "sink")
        take(self, COUNT.or_none(), "threshold")
        take(self, COUNT, "block")

    def _options(self, geometry: Geometry) -> dict[str, Any]:
        sink = geometry.frame_sink if self.sink is None else self.sink
        return {"block": self.block, "threshold": self.threshold, "shrink": self.shrink, "sink": sink}

    def _decay(self, geometry: Geometry) -> float:
        if self.density is not None:
            return radial.decay_for(geometry, self.density, **self._options(geometry))
        return 1.0 if self.decay is None else float(self.decay)

    def plan(self, geometry: Geometry, q: Any = None, k: Any = None, **_: Any) -> HeadPlans:
        """One plan for all heads."""
        return kept(self, geometry)

    def build(self, geometry: Geometry) -> HeadPlans:
        """The plan, made anew."""
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        return HeadPlans((radial.plan_of(geometry, decay=self._decay(geometry), **self._options(geometry)),))

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{decay, sink, density}."""
        sink = self._options(geometry)["sink"]
        return {"decay": self._decay(geometry), "sink": sink, "density": self.plan(geometry).density}


@dataclass(frozen=True)
class SlidingTile:
    """Sliding tile attention (masks/sta.py): a window of tiles around each tile. Static.

    Attributes:
        density: finds the window: the one that keeps the most within it. With neither: 0.2.
        window: tiles (frames, rows, columns), instead of density.
        tile: tokens (frames, rows, columns); None: chosen for the grid, at most `block` tokens.
        block: tokens.
    """

    density: float | None = None
    window: sta.Three | None = None
    tile: sta.Three | None = None
    block: int = BLOCK

    name: ClassVar[str] = "sta"
    static: ClassVar[bool] = True
    recommended: ClassVar[Recommended] = Recommended(0.24, 0, "the paper's search: the first 12 of 50 steps dense")

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density")
        take(self, THREE.or_none(), "window", "tile")
        either(self.density, "window", self.window)
        take(self, COUNT, "block")

    def _shape(self, geometry: Geometry) -> tuple[sta.Three, sta.Three]:
        tile = self.tile or sta.choose_tile(geometry, self.block)
        density = 0.2 if self.density is None else self.density
        return tile, self.window or sta.choose_window(geometry, tile, density)

    def plan(self, geometry: Geometry, q: Any = None, k: Any = None, **_: Any) -> HeadPlans:
        """One plan for all heads."""
        return kept(self, geometry)

    def build(self, geometry: Geometry) -> HeadPlans:
        """The plan, made anew."""
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        tile, window = self._shape(geometry)
        return HeadPlans((sta.plan_of(geometry, tile=tile, window=window, block=self.block),))

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{tile, grid, window, density}."""
        tile, window = self._shape(geometry)
        grid = sta.grid_of(geometry, tile)
        return {"tile": tile, "grid": grid, "window": window, "density": self.plan(geometry).density}
