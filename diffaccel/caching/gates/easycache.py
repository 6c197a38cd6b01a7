"""EasyCache's gate: the rate at which the denoiser's output follows its input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..step import Ruling, Step
from .base import INPUT, Gate, check_distance, check_threshold, reduce_decision


@dataclass(frozen=True, slots=True)
class RateState:
    """Input of the step before; input and output of the last computed step; their rate of change; the sum."""

    seen: torch.Tensor | None = None
    computed_input: torch.Tensor | None = None
    computed_output: torch.Tensor | None = None
    rate: torch.Tensor | None = None  # k, a scalar on the device ([B] with distance "worst")
    total: float = 0.0
    value: float | None = None


@dataclass(frozen=True)
class RateGate(Gate[RateState]):
    """EasyCache: E <- E + k |x_t - x_{t-1}| / |v_i|, hit iff E < threshold; k = |v_i - v_j| / |x_i - x_j|.

    x and v are the denoiser's raw input and output, i and j its last two computed steps, |.| the mean absolute value.
    Reuse is v_t = x_t + (v_i - x_i): a residual in the scope "denoiser". In two-call guidance the conditional branch
    decides for both. Source: EasyCache (arXiv 2507.02860), its runtime-adaptive criterion.

    Attributes:
        threshold: budget of accumulated relative change (published: 0.05 Wan, 0.025 HunyuanVideo); 0: never.
        distance: "mean" over the batch, or the "worst" sample's.
    """

    threshold: float
    distance: str = "mean"
    observes: ClassVar[str] = INPUT

    def __post_init__(self) -> None:
        check_threshold(self)
        check_distance(self.distance)

    @property
    def looks_back(self) -> int:
        """Two computed steps give the rate."""
        return 2

    def per_sample(self) -> RateGate:
        """With distance "worst"."""
        return replace(self, distance="worst")

    def _size(self, x: torch.Tensor) -> torch.Tensor:
        """Mean absolute value: of the whole batch (a scalar), or of each sample ([B])."""
        return x.abs().mean() if self.distance == "mean" else x.abs().flatten(1).mean(1)

    def start(self) -> RateState:
        """Nothing seen."""
        return RateState()

    def decide(
        self, state: RateState, seen: torch.Tensor, step: Step, ruling: Ruling = Ruling.FREE
    ) -> tuple[bool, RateState]:
        """`seen`: raw input, any shape. Two computed steps are needed before a hit."""
        if ruling is Ruling.FREE and state.rate is not None:
            assert state.seen is not None and state.computed_output is not None
            moved = state.rate * self._size(seen - state.seen) / self._size(state.computed_output)
            value = state.total + reduce_decision(moved.max(), step.group)
            hit = value < self.threshold and self.threshold > 0
            return hit, replace(state, seen=seen, total=value if hit else 0.0, value=value)
        hit = ruling is Ruling.REUSE
        return hit, replace(state, seen=seen, total=state.total if hit else 0.0, value=None)

    def record(self, state: RateState, seen: torch.Tensor, output: torch.Tensor, step: Step) -> RateState:
        """`output`: raw output of this computed step, shaped like the input."""
        rate = None
        if state.computed_input is not None and state.computed_output is not None:
            rate = self._size(output - state.computed_output) / self._size(seen - state.computed_input)
        return replace(state, computed_input=seen, computed_output=output, rate=rate)
