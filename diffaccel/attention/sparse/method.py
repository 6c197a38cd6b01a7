"""What the methods of sparse attention share: their protocol, what authors recommend, checks of their options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch

from ...errors import InvalidOptionError, unknown
from ..geometry import Geometry
from ..plan import HeadPlans
from .sta import Three


@dataclass(frozen=True)
class Recommended:
    """What the authors run: share of steps (at the start) and number of layers that stay dense."""

    dense_steps: float
    dense_layers: int
    source: str


class Method(Protocol):
    """What a lever needs of a method.

    `static`: the plan depends on the geometry alone (q and k may be None), so it can be kept. `state` is a dict
    private to one run, branch and layer.
    """

    name: ClassVar[str]
    static: ClassVar[bool]
    recommended: ClassVar[Recommended]

    def plan(
        self,
        geometry: Geometry,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        *,
        layer: int,
        step: int,
        state: dict[str, Any],
        v: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> HeadPlans:
        """Plans for q, k, v [B, H, N, D]."""

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """Parameters found for this geometry; with `density` where that is known beforehand."""


class Builder(Protocol):
    """A frozen config with a part that depends on config and geometry alone."""

    def build(self, geometry: Geometry) -> HeadPlans:
        """That part, made anew."""

    def __hash__(self) -> int: ...


@lru_cache(maxsize=16)
def kept(method: Builder, geometry: Geometry) -> HeadPlans:
    """What depends on config and geometry alone, made once: the same object, so kernels know what they prepared."""
    return method.build(geometry)


# ---- checks of options ----------------------------------------------------------------------------------------------


def share(name: str, value: float | None, low_open: bool = True) -> None:
    """Raise unless `value` is None or a number in (0, 1] (or [0, 1])."""
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (0 < value <= 1 or (value == 0 and not low_open)):
        raise InvalidOptionError(
            f"{name}={value!r}: it must be a number {'above 0' if low_open else 'from 0'} up to 1"
        )


def whole(name: str, value: int | None, least: int = 1) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise InvalidOptionError(f"{name}={value!r}: it must be a whole number of at least {least}")


def positive(name: str, value: float | None) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value <= 0:
        raise InvalidOptionError(f"{name}={value!r}: it must be a number above 0")


def three(name: str, value: Three | None) -> None:
    if value is None:
        return
    good = isinstance(value, tuple) and len(value) == 3
    if not good or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in value):
        raise InvalidOptionError(
            f"{name}={value!r}: it must be three whole numbers of at least 1 (frames, rows, columns)"
        )


def either(density: float | None, name: str, value: object) -> None:
    if density is not None and value is not None:
        raise InvalidOptionError(f"density={density!r} finds {name}, so {name}={value!r} cannot be given as well")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise unknown(name, value, allowed)


def need_tensors(name: str, *tensors: torch.Tensor | None) -> None:
    if any(x is None for x in tensors):
        raise InvalidOptionError(f"{name} makes its plan from q and k: both must be given")
