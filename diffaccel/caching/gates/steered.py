"""The gate of step control: which steps are computed is decided at the sampler, `caching/steering.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..step import Ruling, Step
from .base import SAMPLER, Gate
from .schedule import NO_STATE, NoState


@dataclass(frozen=True)
class SteeredGate(Gate[NoState]):
    """Does what the run's control says."""

    observes: ClassVar[str] = SAMPLER
    reads_schedule: ClassVar[bool] = True

    def start(self) -> NoState:
        """Nothing."""
        return NO_STATE

    def decide(
        self, state: NoState, seen: torch.Tensor, step: Step, ruling: Ruling = Ruling.FREE
    ) -> tuple[bool, NoState]:
        """`seen`: whether each sample is to be reused, [B] booleans on the host."""
        return (bool(seen.all()) if ruling is Ruling.FREE else ruling is Ruling.REUSE), NO_STATE
