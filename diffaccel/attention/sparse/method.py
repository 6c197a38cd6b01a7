"""What every method of sparse attention is: a frozen config that answers a `Query` with `HeadPlans`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from ...errors import InvalidOptionError
from ..geometry import Geometry
from ..plan import HeadPlans


@dataclass(frozen=True, eq=False)
class Query:
    """What a plan is asked for: one attention call of one layer.

    Attributes:
        geometry: how the N tokens lie: video (frame by frame) and text.
        q, k, v: [B, H, N, D]; None where the plan hangs on the geometry alone (v: where it is not needed).
        scale: factor of the scores; None is 1 / sqrt(D).
        layer: index of the transformer block in running order.
        step: of the run, from 0.
        state: private to one run, guidance branch and layer; a method may keep tensors there for later steps, which
            it replaces and never writes into.
    """

    geometry: Geometry
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    scale: float | None = None
    layer: int = 0
    step: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    def tensors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k; raises InvalidOptionError where the method `name` was not given them."""
        if self.q is None or self.k is None:
            raise InvalidOptionError(f"{name} makes its plan from q and k: both must be given")
        return self.q, self.k


class Method(Protocol):
    """What a lever needs of a method. `static`: the plan depends on the geometry alone, so it can be kept."""

    name: ClassVar[str]
    static: ClassVar[bool]

    def plan(self, query: Query) -> HeadPlans:
        """Which blocks every head keeps."""

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """Parameters found for this geometry; with `density` where that is known beforehand."""


@runtime_checkable
class Warms(Protocol):
    """A method that can make use of dense steps: it looks at q and k there, so that its first plan costs less."""

    def warm(self, query: Query, steps: int) -> None:
        """One of `steps` dense steps at the start of the run; what it learns goes into `query.state`."""


class Builder(Protocol):
    """A frozen config with a part that depends on config and geometry alone."""

    def build(self, geometry: Geometry) -> HeadPlans:
        """That part, made anew."""

    def __hash__(self) -> int: ...


@lru_cache(maxsize=16)
def kept(method: Builder, geometry: Geometry) -> HeadPlans:
    """What depends on config and geometry alone, made once: the same object, so kernels know what they prepared."""
    return method.build(geometry)
