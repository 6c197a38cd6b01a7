"""Gates and a predictor that need no model knowledge beyond inputs and outputs: EasyCache and DiCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...errors import unknown
from ..predictors import Sample
from ..step import Ruling, Step
from .base import INPUT, PAIR, Gate, SumGate, check_distance, check_threshold, reduce_decision

# ---- EasyCache -----------------------------------------------------------------------------------------------------


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


# ---- DiCache -------------------------------------------------------------------------------------------------------


MEASURES = ("difference", "output")


@dataclass(frozen=True)
class ProbeSumGate(SumGate):
    """DiCache: e <- e + d_t, hit iff e < threshold, with d_t the change of a probe y (output of the first blocks).

    d_t = d(y_t, y_{t-1}) for measure "output", | d(y_t, y_{t-1}) - d(x_t, x_{t-1}) | for "difference", x the input of
    the stack, d relative L1. On a miss the stack goes on behind the probe, so nothing is computed twice.
    Source: DiCache (arXiv 2508.17356), online probe profiling; published: "output" 0.4 FLUX, 0.1 HunyuanVideo,
    0.08 Wan; "difference" 0.08 FLUX.
    """

    measure_of: str = "output"
    observes: ClassVar[str] = PAIR

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure_of not in MEASURES:
            raise unknown("measure", str(self.measure_of), MEASURES)

    def probe(self, seen: Any) -> torch.Tensor:
        """y - x, [B, T, C]."""
        return seen[0] - seen[1]

    def measure(self, current: Any, previous: Any) -> torch.Tensor:
        """Both are (y, x), each [B, T, C]."""
        change = super().measure(current[0], previous[0])
        return change if self.measure_of == "output" else (change - super().measure(current[1], previous[1])).abs()


def dicache_gamma(
    probe: torch.Tensor, newest: torch.Tensor, older: torch.Tensor, low: float = 1.0, high: float = 1.5
) -> torch.Tensor:
    """gamma = clip(|q_t - q_j| / |q_i - q_j|, low, high), a scalar tensor that stays on the device.

    q are probe residuals [B, T, C] of this step, of the newest (i) and of the older (j) computed step.
    Source: DiCache (arXiv 2508.17356), dynamic cache trajectory alignment; bounds 1 and 1.5 from its FLUX script.
    """
    return ((probe - older).abs().mean() / (newest - older).abs().mean()).nan_to_num(low).clamp(low, high)


@dataclass(frozen=True)
class ProbeAligned:
    """DiCache's predictor: R = R_j + gamma (R_i - R_j), as far along as the probe has moved (`dicache_gamma`)."""

    low: float = 1.0
    high: float = 1.5
    coordinate: ClassVar[str] = "step"
    depth: ClassVar[int] = 2
    needs_probe: ClassVar[bool] = True

    def predict(
        self, history: Sequence[Sample], at: float, probe: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The streams at this step, whose probe residual is `probe`; one sample, or no probes: that sample's."""
        if len(history) < 2 or probe is None or history[-1].probe is None or history[-2].probe is None:
            return history[-1].values
        older, newest = history[-2:]
        assert newest.probe is not None and older.probe is not None
        gamma = dicache_gamma(probe, newest.probe, older.probe, self.low, self.high)
        return tuple([j + gamma * (i - j) for i, j in zip(newest.values, older.values, strict=True)])
