"""The gate of static schedules: which steps are computed is known before the loop. No tensor is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...core.options import take_plain
from ...errors import InvalidOptionError
from ...extrapolation.schedule import check_form, parse_schedule
from ..step import Ruling, Step
from .base import NOTHING, Gate


@dataclass(frozen=True, slots=True)
class NoState:
    """A static gate remembers nothing and compares nothing."""

    value: None = None


NO_STATE = NoState()


@dataclass(frozen=True)
class ScheduleGate(Gate[NoState]):
    """Reuses the steps that a schedule names, if they may be.

    Attributes:
        schedule: a mask, a string, a list of steps (`parse_schedule`), or a function steps -> mask.
    """

    schedule: Any
    observes: ClassVar[str] = NOTHING

    def __post_init__(self) -> None:
        take_plain(self)
        if not callable(self.schedule):
            check_form(self.schedule)

    def fit(
        self, total: int | None, branch: str = "cond", sigmas: tuple[float, ...] | None = None, begin: int = 0
    ) -> ScheduleGate:
        """With the mask for this loop."""
        if total is None:
            raise InvalidOptionError("a step schedule needs the number of steps, and this loop does not say it")
        made = self.schedule(total) if callable(self.schedule) else self.schedule
        return ScheduleGate(parse_schedule(made, total))

    def start(self) -> NoState:
        """Nothing."""
        return NO_STATE

    def decide(self, state: NoState, seen: Any, step: Step, ruling: Ruling = Ruling.FREE) -> tuple[bool, NoState]:
        """`seen` is not looked at. The gate must have been fitted to the loop."""
        return (not self.schedule[step.index] if ruling is Ruling.FREE else ruling is Ruling.REUSE), NO_STATE
