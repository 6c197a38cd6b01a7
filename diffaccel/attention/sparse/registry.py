"""The registry of sparse video attention: frozen configs; a geometry (and q, k) goes in, `HeadPlans` come out.

Every method finds its own parameter from `density`, the share of query-key pairs to keep (text, sink and all), unless
the parameter is given: radial its decay, sta its window, svg its band, topk its k. svg2 goes by `top_p`, and density
is its cap. density 1.0 is a plan that keeps everything, which kernels compute as dense attention.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from ...errors import InvalidOptionError, nearest, unknown
from ..geometry import Geometry
from .method import Method, Query
from .radial import Radial, least_density
from .sta import SlidingTile
from .svg import SparseVideoGen
from .svg2 import SparseVideoGen2
from .topk import TopBlocks

__all__ = [
    "METHODS",
    "Method",
    "Query",
    "Radial",
    "SlidingTile",
    "SparseVideoGen",
    "SparseVideoGen2",
    "TopBlocks",
    "auto_method",
    "make_method",
]

METHODS: dict[str, type[Any]] = {
    "radial": Radial,
    "sta": SlidingTile,
    "svg": SparseVideoGen,
    "svg2": SparseVideoGen2,
    "topk": TopBlocks,
}


def make_method(name: str, **options: Any) -> Method:
    """The config of a method by name; unknown names and options raise with the nearest allowed one."""
    if name not in METHODS:
        raise unknown("sparse attention method", name, ["auto", *METHODS])
    allowed = [field.name for field in dataclasses.fields(METHODS[name])]
    for option in options:
        if option not in allowed:
            raise InvalidOptionError(f"{name} takes no {option!r}: {nearest(option, allowed)}")
    method: Method = METHODS[name](**options)
    return method


RADIAL_LEAST = 0.3  # "auto" takes radial attention where it can go down to this density, unless told another


@lru_cache(maxsize=64)
def auto_method(geometry: Geometry, density: float | None = None) -> tuple[str, str]:
    """(name of a method for this geometry, why), for method="auto".

    Radial attention keeps neighbouring frames and the sink whole and a band of a block's width elsewhere: with many
    frames that is little, and at the same density it lost least on the video testbed. Where it cannot go down to
    `density`, Sparse VideoGen, which came next there (benchmarks/sparse_attention.py) and reaches any density. A
    single frame has no bands over frames: sliding tiles.
    """
    f = geometry.frames
    size = f"{f} frame{'s' * (f != 1)} of {geometry.rows} x {geometry.columns}"
    if f == 1:
        return "sta", f"{size}: the other methods tell near from far by frames"
    least = least_density(geometry)
    if least <= (RADIAL_LEAST if density is None else density):
        return "radial", f"{size}: bands that narrow with distance can go down to a density of {least:.2f}"
    return "svg", f"{size}: radial attention would keep at least {least:.2f} of all pairs; svg reaches any density"
