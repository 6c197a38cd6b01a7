"""The gate of step control: which steps are computed is decided at the sampler, `caching/steering.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..step import Ruling, Step
from .base import SAMPLER, Gate
from .schedule import NO_STATE, NoState


@dataclass(frozen=True)
class SteeredGate(Gate[NoState]):
    """Does what the run's control says."""

    observes: ClassVar[str] = SAMPLER
    spans_gaps: ClassVar[bool] = True  # what the sampler is given does not come from this branch's memory

    def start(self) -> NoState:
        """Nothing."""
        return NO_STATE

    def decide(
        self, state: NoState, seen: list[bool], step: Step, ruling: Ruling = Ruling.FREE
    ) -> tuple[bool, NoState]:
        """`seen`: whether each sample is to be reused, B of them."""
        return (all(seen) if ruling is Ruling.FREE else ruling is Ruling.REUSE), NO_STATE
