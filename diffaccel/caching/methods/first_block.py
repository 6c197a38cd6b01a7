"""First-Block Cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.accelerator import Target
from ...core.options import GOT, one_of, take
from ...extrapolation.forecast import Forecast
from ..engine import CacheRecipe
from ..gates.base import ProbeGate
from ..policy import Policy
from ..scopes.stack import Stack
from .base import Extrapolating, counted


@dataclass(frozen=True)
class FirstBlockCache(Extrapolating):
    """Run the first block; if its residual hardly moved since the last computed step, reuse the rest.

    Reuse when mean|r_t - r_i| / mean|r_i| < threshold, with r the residual of the first block and i the last
    computed step; then y_t = b0(x_t) + (y_i - b0(x_i)). The decision is one for the whole batch.
    Source: First-Block Cache of ParaAttention, after TeaCache (arXiv 2411.19108).

    Attributes:
        threshold: relative change below which a step is reused; 0 turns the cache off (bit-equal). FLUX.1-dev
            is commonly run at 0.05 to 0.12 (published by ParaAttention).
        probe_order: r_i becomes the forecast of r_t of this order, so that the gate measures how well the probe
            could be foretold; 0: as published.
    """

    threshold: float = 0.08
    probe_order: int = 0

    name: ClassVar[str] = "cache.first_block"

    def __post_init__(self) -> None:
        super().__post_init__()
        take(self, one_of(0, 1, 2, 3), "probe_order", form=GOT)
        self._gate()

    def _gate(self) -> ProbeGate:
        return ProbeGate(self.threshold, Forecast(self.probe_order, self.basis, self.coordinate), tested=True)

    def recipe(self, target: Target) -> CacheRecipe:
        """A probe of one block."""
        return CacheRecipe(Policy(self._gate(), self.forecast(), self.guards()), Stack(1))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """What decides."""
        return f"one block of {counted(self, target)} decides about the rest"
