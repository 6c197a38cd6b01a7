"""A schedule of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...core.accelerator import Target
from ...errors import InvalidOptionError
from ...extrapolation.schedule import check_form
from ..engine import CacheRecipe
from ..gates.schedule import ScheduleGate
from ..policy import Policy
from ..scopes.named import scope_of
from ..tables import load_table, steps_mask
from .base import Extrapolating


@dataclass(frozen=True)
class StepSchedule(Extrapolating):
    """Compute the steps that a list, a mask or a string names, and reuse or forecast the others.

    The steps are known before the loop, so nothing is compared. The published masks ("slow", "medium", "fast",
    "ultra") are cache-dit's (1.5.3), for the numbers of steps that it generated.

    Attributes:
        steps: [0, 1, 2, 5, 9] (computed steps, negative ones from the end), flags, "11100100...", or a mask's name.
        scope: "denoiser" (its output), "stack" (the residual of all blocks) or "modules".
        correct: order with which a computed step makes good what forecasts before it missed; see `scopes.Denoiser`.
    """

    steps: str | Sequence[int] = ()
    scope: str = "denoiser"
    order: int = 1
    correct: int = 0
    last_steps: int = 0

    name: ClassVar[str] = "cache.schedule"

    def __post_init__(self) -> None:
        super().__post_init__()
        scope_of(self.scope, self.correct)
        if not isinstance(self.steps, (str, Sequence)) or len(self.steps) == 0:
            raise InvalidOptionError(
                f"steps must name the computed steps (a list, flags, a string of 0 and 1, or one of "
                f"{', '.join(_published())}), got {self.steps!r}"
            )
        if not (isinstance(self.steps, str) and self.steps in _published()):
            check_form(self.steps)

    def recipe(self, target: Target) -> CacheRecipe:
        """A static schedule."""
        steps = self.steps
        gate = ScheduleGate(partial(steps_mask, steps) if isinstance(steps, str) and steps in _published() else steps)
        return CacheRecipe(Policy(gate, self.forecast(), self.guards()), scope_of(self.scope, self.correct))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """What is left out."""
        return f"{self.scope}: the steps are known before the loop"


def _published() -> list[str]:
    return list(load_table("steps_masks")["masks"]["28"])
