"""TaylorSeer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...core.accelerator import Target
from ...core.options import BOOLEAN, GOT, take
from ...extrapolation import schedule
from ..engine import CacheRecipe, Scope
from ..gates.schedule import ScheduleGate
from ..policy import Policy
from ..scopes.named import scope_of
from .base import Extrapolating


@dataclass(frozen=True)
class TaylorSeer(Extrapolating):
    """Compute every `interval`-th step and forecast the ones between.

    Lite mode forecasts the denoiser's output, which costs next to no memory; otherwise the output of every attention
    and feed-forward module is remembered and forecast, as in the paper (order + 1 times all of them).
    Source: TaylorSeer (arXiv 2503.06923), its FLUX script's schedule (`first_enhance` 3). basis="ladder" is what
    its code computes; "newton" is the same at order 1 and exact on polynomials beyond.

    Attributes:
        interval: steps from one computed step to the next.
        order: 1 to 3 (0 reuses as it is).
        use_lite_mode: forecast the denoiser's output only.
        first_enhance: so many steps at the start are computed.
        correct: order with which a computed step makes good what forecasts before it missed (lite mode only); not
            part of the paper, see `scopes.Denoiser`.
    """

    interval: int = 4
    order: int = 1
    use_lite_mode: bool = True
    first_enhance: int = 3
    correct: int = 0

    name: ClassVar[str] = "cache.taylorseer"

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule.taylorseer(1, self.interval, self.first_enhance)
        take(self, BOOLEAN, "use_lite_mode", form=GOT)
        self._scope()

    def _scope(self) -> Scope:
        return scope_of("denoiser" if self.use_lite_mode else "modules", self.correct)

    def off(self) -> str | None:
        """An interval of 1 computes everything."""
        return "interval 1: every step is computed" if self.interval == 1 else None

    def recipe(self, target: Target) -> CacheRecipe:
        """A static schedule with a forecast."""
        gate = ScheduleGate(partial(schedule.taylorseer, interval=self.interval, first=self.first_enhance))
        return CacheRecipe(Policy(gate, self.forecast(), self.guards()), self._scope())

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """Which steps, of what."""
        what = "the denoiser's output" if self.use_lite_mode else "every attention and feed-forward module"
        return f"{what} is forecast between every {self.interval} steps; steps are known before the loop"
