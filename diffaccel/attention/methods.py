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


def choose(geometry: Geometry) -> tuple[str, str]:
    """(name of a static method for this geometry, why), for method="auto"."""
    return "sta", "TODO"
