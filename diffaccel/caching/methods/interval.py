"""Reuse at a uniform interval (FORA)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...core.accelerator import Target
from ...extrapolation import schedule
from ..engine import CacheRecipe
from ..gates.schedule import ScheduleGate
from ..policy import Policy
from ..scopes.named import scope_of
from .base import Extrapolating


@dataclass(frozen=True)
class IntervalCache(Extrapolating):
    """Compute every `interval`-th step and the last one; between them reuse what the modules said.

    Source: FORA (arXiv 2407.01425), which reuses the outputs of attention and feed-forward modules.

    Attributes:
        interval: steps from one computed step to the next; 1: every step.
        scope: "modules" (FORA), "stack" (the residual of all blocks) or "denoiser" (its output).
        correct: order with which a computed step makes good what was missed before it; see `scopes.Denoiser`.
    """

    interval: int = 2
    scope: str = "modules"
    correct: int = 0

    name: ClassVar[str] = "cache.interval"

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule.fora(1, self.interval)
        scope_of(self.scope, self.correct)

    def off(self) -> str | None:
        """An interval of 1 computes everything."""
        return "interval 1: every step is computed" if self.interval == 1 else None

    def recipe(self, target: Target) -> CacheRecipe:
        """A static schedule."""
        gate = ScheduleGate(partial(schedule.fora, interval=self.interval))
        return CacheRecipe(Policy(gate, self.forecast(), self.guards()), scope_of(self.scope, self.correct))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """Which steps, of what."""
        return f"{self.scope}: one step of {self.interval} is computed; steps are known before the loop"
