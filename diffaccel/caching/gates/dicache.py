"""DiCache's gate and predictor: the first blocks as a probe, and a reuse aligned with the way the probe has gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import unknown
from ...extrapolation.forecast import Sample
from .base import PAIR, SumGate

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
        residual: torch.Tensor = seen[0] - seen[1]
        return residual

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
