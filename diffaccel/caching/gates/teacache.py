"""TeaCache's gate: accumulated change of the modulated input, rescaled by a polynomial fitted per model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ...core.options import take_plain
from ...errors import InvalidOptionError
from .base import MODULATED, TIME, SumGate


@dataclass(frozen=True)
class PolynomialGate(SumGate):
    """TeaCache: a <- a + p(|m_t - m_{t-1}| / |m_{t-1}|), hit iff a < threshold; a computed step sets a to 0.

    Several published polynomials are negative in their working range (Wan 14B below 0.129), where a falls. The sign
    is kept, as in the reference, unless `use_abs` (vLLM-Omni); the two give opposite schedules, so coefficients
    and sign belong together. The first and last steps that the reference forces are guards, not part of the gate.
    Source: TeaCache (arXiv 2411.19108); coefficients in tables/teacache.json.

    Attributes:
        threshold: budget of accumulated change; 0: never.
        coefficients: of p, highest power first; (1, 0) leaves the distance as it is.
        use_abs: add |p| instead of p.
    """

    coefficients: tuple[float, ...] = (1.0, 0.0)
    use_abs: bool = False
    observes: ClassVar[str] = MODULATED

    def __post_init__(self) -> None:
        super().__post_init__()
        take_plain(self)
        if not self.coefficients or not all(np.isfinite(self.coefficients)):
            raise InvalidOptionError(f"coefficients must be finite numbers, highest power first: {self.coefficients}")

    def rescale(self, distance: float) -> float:
        """p(distance), by Horner's rule."""
        value = 0.0
        for coefficient in self.coefficients:
            value = value * distance + coefficient
        return abs(value) if self.use_abs else value


@dataclass(frozen=True)
class TimePolynomialGate(PolynomialGate):
    """TeaCache on models whose gate tensor is the time embedding: the same for every prompt, known before the loop.

    Attributes:
        projected: take the embedding behind its last projection.
    """

    projected: bool = False
    observes: ClassVar[str] = TIME


class Fit(NamedTuple):
    """A fitted polynomial, highest power first, with the share of variance that it explains."""

    coefficients: tuple[float, ...]
    r_squared: float
    points: int


def fit_polynomial(gate_distances: Sequence[float], output_distances: Sequence[float], degree: int = 4) -> Fit:
    """Calibrates TeaCache: least squares of the output's relative change on that of the gate tensor.

    Both lists hold one relative L1 per pair of neighbouring steps, over 50 or more prompts, every step computed.
    Source: TeaCache (arXiv 2411.19108): degree 4, `np.polyfit`.
    """
    x, y = np.asarray(gate_distances, dtype=np.float64), np.asarray(output_distances, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise InvalidOptionError(f"need two lists of one length, got {x.shape} and {y.shape}")
    if len(np.unique(x)) <= degree:
        raise InvalidOptionError(f"{len(np.unique(x))} distinct distances cannot fix a polynomial of degree {degree}")
    coefficients = np.polyfit(x, y, degree)
    spread = float(((y - y.mean()) ** 2).sum())
    left = float(((y - np.polyval(coefficients, x)) ** 2).sum())
    return Fit(tuple(float(c) for c in coefficients), 1 - left / spread if spread else 1.0, len(x))
