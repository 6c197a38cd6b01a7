"""What the methods of sparse attention share: their protocol, what authors recommend, checks of their options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch

from ...core import options
from ...errors import InvalidOptionError, unknown
from ..geometry import Geometry
from ..plan import HeadPlans


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


def take(config: Any, check: options.Check, *names: str) -> None:
    """Refuse fields of a method's config that are not what `check` allows."""
    options.take(config, check, *names, form="{name}={value}: it must be {allowed}")


SHARE = options.above(0, 1, "a number above 0 up to 1")
SHARE_OR_0 = options.number(0, 1, "a number from 0 up to 1")
POSITIVE = options.above(0)
COUNT = options.whole(1)
THREE = options.Check(
    "three whole numbers of at least 1 (frames, rows, columns)",
    lambda value: isinstance(value, tuple) and len(value) == 3 and all(options.is_whole(n) and n >= 1 for n in value),
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
