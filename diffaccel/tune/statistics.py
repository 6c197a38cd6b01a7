"""What a few prompts say about a new one: conformal quantiles, a line through decibels. Intervals of means are in
`quality/bootstrap.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def conformal_quantile(residuals: Sequence[float], miss: float) -> float:
    """The number that a new residual falls below with a probability of at most `miss`, if it comes as those did.

    Split conformal, one-sided: the k-th smallest of n residuals with k = floor(miss (n + 1)); minus infinity where n
    is too small to promise so much. Source: Vovk, Gammerman, Shafer (2005); Lei et al. (2018).
    """
    rank = math.floor(miss * (len(residuals) + 1) + 1e-12)
    return -math.inf if rank < 1 else float(sorted(residuals)[min(rank, len(residuals)) - 1])


@dataclass(frozen=True)
class Line:
    """value = at_one + per_decade log10(knob), and what each prompt was off by: residuals[prompt][knob]."""

    at_one: float
    per_decade: float
    residuals: tuple[tuple[float, ...], ...]

    def value(self, knob: float) -> float:
        """The mean at this setting."""
        return self.at_one + self.per_decade * math.log10(knob)

    def bound(self, knob: float, miss: float = 0.1) -> float:
        """What a new prompt falls below with a probability of at most `miss`.

        A prompt counts once, with its lowest residual: settings of one prompt are no independent witnesses.
        """
        return self.value(knob) + conformal_quantile([min(each) for each in self.residuals], miss)

    def knob_for(self, value: float, miss: float | None = None) -> float:
        """The setting at which the mean (or, with `miss`, the bound) is `value`; 0 where there is none."""
        off = 0.0 if miss is None else conformal_quantile([min(each) for each in self.residuals], miss)
        if off == -math.inf or self.per_decade >= 0:
            return 0.0  # nothing can be promised
        return float(10 ** ((value - off - self.at_one) / self.per_decade))


def fit_line(knobs: Sequence[float], values: np.ndarray) -> Line:
    """Least squares of [P, K] values against log10 of K settings, one line for all prompts."""
    x = np.log10(np.asarray(knobs, dtype=float))
    table = np.asarray(values, dtype=float)
    mean = table.mean(axis=0)
    slope = float(((x - x.mean()) @ (mean - mean.mean())) / ((x - x.mean()) @ (x - x.mean())))
    at_one = float(mean.mean() - slope * x.mean())
    residuals = table - (at_one + slope * x)
    return Line(at_one, slope, tuple(tuple(row) for row in residuals.tolist()))
