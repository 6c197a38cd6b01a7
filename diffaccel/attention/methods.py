"""The registry of sparse video attention: frozen configs; a geometry (and q, k) goes in, `HeadPlans` come out.

Every method finds its own parameter from `density`, the share of query-key pairs to keep (text, sink and all), unless
the parameter is given: radial its decay, sta its window, svg its band, topk its k. svg2 goes by `top_p`, and density
is its cap. density 1.0 is a plan that keeps everything, which kernels compute as dense attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import InvalidOptionError, nearest, unknown
from .geometry import Geometry
from .masks.layout import BLOCK
from .method_parts import Method, Recommended
from .methods_dynamic import SparseVideoGen, SparseVideoGen2, TopBlocks
from .methods_static import Radial, SlidingTile

__all__ = [
    "METHODS",
    "Method",
    "Radial",
    "Recommended",
    "SlidingTile",
    "SparseVideoGen",
    "SparseVideoGen2",
    "TopBlocks",
    "choose",
    "make",
]

METHODS: dict[str, type[Any]] = {
    "radial": Radial,
    "sta": SlidingTile,
    "svg": SparseVideoGen,
    "svg2": SparseVideoGen2,
    "topk": TopBlocks,
}


def make(name: str, **options: Any) -> Method:
    """The config of a method by name; unknown names and options raise with the nearest allowed one."""
    if name not in METHODS:
        raise unknown("sparse attention method", name, ["auto", *METHODS])
    allowed = [field.name for field in dataclasses.fields(METHODS[name])]
    for option in options:
        if option not in allowed:
            raise InvalidOptionError(f"{name} takes no {option!r}: {nearest(option, allowed)}")
    method: Method = METHODS[name](**options)
    return method


RADIAL_LEAST = 0.25  # "auto" takes radial attention where it can go down to this density


def choose(geometry: Geometry) -> tuple[str, str]:
    """(name of a method for this geometry, why), for method="auto": one that is made once and costs nothing then.

    Radial attention keeps neighbouring frames and the sink whole and a band of a block's width elsewhere: with many
    frames that is little. Where it is not, sliding tiles, which reach any density.
    """
    f, sink = geometry.frames, geometry.frames if geometry.frame_sink else 0
    near = 3 * f - 2
    band = min(1.0, 2 * BLOCK / geometry.frame)
    least = min(1.0, (near + sink + band * (f * f - near - sink)) / f**2)
    size = f"{f} frames of {geometry.rows} x {geometry.columns}"
    if f > 1 and least <= RADIAL_LEAST:
        return "radial", f"{size}: bands that narrow with distance can go down to a density of {least:.2f}"
    return "sta", f"{size}: radial attention would keep at least {least:.2f} of all pairs; tiles reach any density"
