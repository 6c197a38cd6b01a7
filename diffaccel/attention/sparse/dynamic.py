"""Methods that look at q and k at every call: Sparse VideoGen 1 and 2, and top-k blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...core.options import BOOLEAN
from ..geometry import Geometry
from ..plan import HeadPlans
from . import sta, svg, svg2, topk
from .layout import BLOCK, full
from .method import COUNT, POSITIVE, SHARE, SHARE_OR_0, THREE, Recommended, either, kept, need_tensors, one_of, take


@dataclass(frozen=True)
class SparseVideoGen:
    """Sparse VideoGen (masks/svg.py): each head spatial or temporal, by the error on sampled rows at every call.

    Attributes:
        density: finds the band's width, sink and text counted in. With neither: 0.3.
        width_frames: half width in frames, instead of density (`svg.width_frames` is the paper's formula).
        sample_rows: video tokens tried per call, out of all of them.
        sink: all see frame 0; None: as the family has it.
        sink_mode: of temporal heads: "reference" (the first S positions place by place) or "frame0".
        block: tokens.
    """

    density: float | None = None
    width_frames: float | None = None
    sample_rows: int = 64
    sink: bool | None = None
    sink_mode: svg.SinkMode = "reference"
    block: int = BLOCK

    name: ClassVar[str] = "svg"
    static: ClassVar[bool] = False
    recommended: ClassVar[Recommended] = Recommended(0.2, 1, "reference scripts, Wan2.1 720p; 0.03 of the layers")

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density")
        take(self, POSITIVE.or_none(), "width_frames")
        either(self.density, "width_frames", self.width_frames)
        take(self, BOOLEAN.or_none(), "sink")
        one_of("sink_mode", self.sink_mode, ("reference", "frame0"))
        take(self, COUNT, "sample_rows", "block")

    def _half(self, geometry: Geometry) -> tuple[int, bool]:
        sink = geometry.frame_sink if self.sink is None else self.sink
        if self.width_frames is not None:
            return svg.half_width(geometry, self.width_frames, self.block), sink
        density = 0.3 if self.density is None else self.density
        return svg.half_width_for(geometry, density, block=self.block, sink=sink), sink

    def plan(
        self,
        geometry: Geometry,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        *,
        layer: int = 0,
        step: int = 0,
        state: dict[str, Any] | None = None,
        v: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> HeadPlans:
        """Two plans, and which head takes which. Without v, heads are told apart by the attention they lose."""
        both = kept(self, geometry)
        if len(both.plans) == 1:
            return both
        need_tensors(self.name, q, k)
        assert q is not None and k is not None
        rows = svg.sample_rows(geometry, self.sample_rows, 1_000_003 * layer + step)
        return HeadPlans(both.plans, svg.classify(q, k, v, both.plans, rows, scale))

    def build(self, geometry: Geometry) -> HeadPlans:
        """The spatial and the temporal plan, or one that keeps everything."""
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        half, sink = self._half(geometry)
        spatial = svg.spatial(geometry, half, block=self.block, sink=sink)
        temporal = svg.temporal(geometry, half, block=self.block, sink=sink, sink_mode=self.sink_mode)
        return HeadPlans((spatial, temporal), torch.zeros(1, 1, dtype=torch.int64))

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{half_width, width_frames, sink, density} (of the spatial plan)."""
        half, sink = self._half(geometry)
        density = kept(self, geometry).plans[0].density
        return {"half_width": half, "width_frames": half / geometry.frame, "sink": sink, "density": density}


@dataclass(frozen=True)
class SparseVideoGen2:
    """Sparse VideoGen 2 (masks/svg2.py): clusters of queries see the clusters of keys that matter to them.

    Attributes:
        density: a cap for every row; None: `top_p` alone decides.
        top_p: attention mass (by centroids) that a row keeps.
        q_clusters, k_clusters: None: one for 252 queries and one for 76 keys, as in the paper at 720p.
        min_kc_ratio: at least this share of the key clusters, unless density is less.
        first_iterations, iterations: of k-means at the first call of a run, and at later ones (warm).
        block: tokens of a text block.
    """

    density: float | None = None
    top_p: float = 0.9
    q_clusters: int | None = None
    k_clusters: int | None = None
    min_kc_ratio: float = 0.1
    first_iterations: int = 50
    iterations: int = 2
    block: int = BLOCK

    name: ClassVar[str] = "svg2"
    static: ClassVar[bool] = False
    recommended: ClassVar[Recommended] = Recommended(0.2, 1, "reference scripts, as SVG")

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density", "top_p")
        take(self, SHARE_OR_0, "min_kc_ratio")
        take(self, COUNT.or_none(), "q_clusters", "k_clusters")
        take(self, COUNT, "first_iterations", "iterations", "block")

    def _clusters(self, geometry: Geometry) -> tuple[int, int]:
        queries = self.q_clusters or math.ceil(geometry.video / 252)
        keys = self.k_clusters or math.ceil(geometry.video / 76)
        return min(queries, geometry.video), min(keys, geometry.video)

    def plan(
        self,
        geometry: Geometry,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        *,
        layer: int = 0,
        step: int = 0,
        state: dict[str, Any] | None = None,
        v: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> HeadPlans:
        """A plan for every head of the batch; `state["centroids"]` is the warm start of the next call."""
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        need_tensors(self.name, q, k)
        assert q is not None and k is not None
        clusters, state = self._clusters(geometry), {} if state is None else state
        warm = state.get("centroids")
        shape = (q.shape[0] * q.shape[1], clusters[0], q.shape[3])
        if warm is not None and (warm.queries.shape != shape or warm.keys.shape[1] != clusters[1]):
            warm = None  # another batch or size
        plans, state["centroids"] = svg2.plans_of(
            geometry,
            q,
            k,
            clusters=clusters,
            top_p=self.top_p,
            min_kc_ratio=self.min_kc_ratio,
            density=self.density,
            iterations=self.iterations if warm is not None else self.first_iterations,
            warm=warm,
            scale=scale,
            seed=layer,
            block=self.block,
        )
        return plans

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{clusters, top_p, cap}: the density depends on q and k."""
        return {"clusters": self._clusters(geometry), "top_p": self.top_p, "cap": self.density}


@dataclass(frozen=True)
class TopBlocks:
    """Top-k tiles by pooled scores (masks/topk.py), per head and call.

    Attributes:
        density: finds k. With neither: 0.25.
        count: key blocks a query block sees, instead of density.
        tile: tokens (frames, rows, columns); None: chosen for the grid, at most `block` tokens.
        block: tokens.
    """

    density: float | None = None
    count: int | None = None
    tile: sta.Three | None = None
    block: int = BLOCK

    name: ClassVar[str] = "topk"
    static: ClassVar[bool] = False
    recommended: ClassVar[Recommended] = Recommended(0.25, 1, "ours: published only with trained weights")

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density")
        take(self, COUNT.or_none(), "count")
        take(self, THREE.or_none(), "tile")
        either(self.density, "count", self.count)
        take(self, COUNT, "block")

    def plan(
        self,
        geometry: Geometry,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        *,
        layer: int = 0,
        step: int = 0,
        state: dict[str, Any] | None = None,
        v: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> HeadPlans:
        """A plan for every head of the batch."""
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        need_tensors(self.name, q, k)
        assert q is not None and k is not None
        density = 0.25 if self.density is None and self.count is None else self.density
        return topk.plans_of(geometry, q, k, density=density, count=self.count, block=self.block, tile=self.tile)

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{tile, grid, count}."""
        tile = self.tile or sta.choose_tile(geometry, self.block)
        grid = sta.grid_of(geometry, tile)
        density = 0.25 if self.density is None else self.density
        count = self.count or topk.count_for(geometry, density, math.prod(grid))
        return {"tile": tile, "grid": grid, "count": count}
