"""Predictors: what a skipped part would have said. Pure functions over a history of computed steps.

Every basis is a linear combination of the stored tensors: y = sum_k w_k f_k, whose weights are host numbers that
depend on the coordinates alone. They sum to 1, so a constant is always predicted exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from ..core.options import GOT, NUMBER, number, one_of, take
from ..errors import unknown
from .step import COORDINATES


class Sample(NamedTuple):
    """One computed step: its coordinate, its tensors (one per stream, e.g. [B, T, C]) and its probe, if kept."""

    at: float
    values: tuple[torch.Tensor, ...]
    probe: torch.Tensor | None = None


# Sample((at, values, probe)) without a Python call, for what runs at every step.
new_sample: Callable[[tuple[float, tuple[torch.Tensor, ...], torch.Tensor | None]], Sample] = partial(
    tuple.__new__, Sample
)


def reuse(entry: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """entry + residual: the residual of the last computed step on top of this step's entry, both [B, T, C]."""
    return entry + residual


# ---- weights of one basis: (coordinates, oldest first; where to predict) -> one weight per coordinate --------------


def newton_weights(coordinates: Sequence[float], at: float) -> list[float]:
    """Newton's divided differences: exact on polynomials of degree < n for any spacing of the n coordinates.

    The interpolating polynomial is unique, so its weights are written in Lagrange's form,
    w_k = prod_{j != k} (at - c_j) / (c_k - c_j). vLLM-Omni's SeaCache extrapolates the same polynomial at order 1.
    """
    weights = []
    for k, own in enumerate(coordinates):
        weight = 1.0
        for j, other in enumerate(coordinates):
            if j != k:
                weight *= (at - other) / (own - other)
        weights.append(weight)
    return weights


def _ladder(coordinates: Sequence[float]) -> list[list[float]]:
    """Row k: weights of the k-th rung F_k at the newest coordinate, with F_k = (F_{k-1} - F_{k-1}^old) / last gap."""
    count = len(coordinates)
    rung = [[float(i == j) for j in range(count)] for i in range(count)]  # rung[i]: weights of f_i
    rows = [rung[-1]]
    for k in range(1, count):
        gaps = [coordinates[i] - coordinates[i - 1] for i in range(k, count)]
        rung = [
            [(n - o) / gap for n, o in zip(new, old, strict=True)]
            for new, old, gap in zip(rung[1:], rung[:-1], gaps, strict=True)
        ]
        rows.append(rung[-1])
    return rows


def _mix(rows: list[list[float]], factors: Sequence[float]) -> list[float]:
    return [sum(f * row[j] for f, row in zip(factors, rows, strict=True)) for j in range(len(rows[0]))]


def ladder_weights(coordinates: Sequence[float], at: float) -> list[float]:
    """TaylorSeer's ladder: sum_k F_k d^k / k!, d = at - newest, every F_k divided by the last gap only.

    Agrees with Newton up to order 1; from order 2 on, or with irregular gaps, it is not the Taylor polynomial.
    Source: TaylorSeer (arXiv 2503.06923), as its code and cache-dit, ParaAttention and diffusers all compute it.
    """
    distance = at - coordinates[-1]
    return _mix(_ladder(coordinates), [distance**k / math.factorial(k) for k in range(len(coordinates))])


def hermite_weights(coordinates: Sequence[float], at: float, sigma: float = 0.5) -> list[float]:
    """HiCache: the ladder's F_k with contracted Hermite polynomials, F_0 + sum_k F_k s^k H_k(s d) / k!.

    H_k are the physicists' polynomials and s = `sigma`. At s = 0.5 the linear term is half of Taylor's, and order 2
    adds a constant -s^2 F_2. Source: HiCache (arXiv 2508.16984); s = 0.5 published there.
    """
    distance = at - coordinates[-1]
    factors = [1.0] + [
        sigma**k * hermite_polynomial(k, sigma * distance) / math.factorial(k) for k in range(1, len(coordinates))
    ]
    return _mix(_ladder(coordinates), factors)


def hermite_polynomial(degree: int, x: float) -> float:
    """The physicists' H_n(x): H_0 = 1, H_1 = 2x, H_{n+1} = 2x H_n - 2n H_{n-1}."""
    before, now = 0.0, 1.0
    for n in range(degree):
        before, now = now, 2 * x * now - 2 * n * before
    return now


BASES: dict[str, Callable[[Sequence[float], float], list[float]]] = {
    "hermite": hermite_weights,
    "ladder": ladder_weights,
    "newton": newton_weights,
}


# ---- tensors -------------------------------------------------------------------------------------------------------


def combine(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """sum_k w_k f_k for weights that sum to 1, newest value last, all of one shape, e.g. [B, T, C].

    Written as newest + sum w_k (f_k - newest): differences are small where values are not. Half precision is summed
    in float32, as weights of opposite sign cancel. One value is returned as it is, so order 0 is bit-equal.
    """
    newest = values[-1]
    if len(values) == 1:
        return newest
    wide = newest.float() if newest.dtype in (torch.bfloat16, torch.float16) else newest
    total = wide
    for value, weight in zip(values[:-1], weights, strict=False):
        total = torch.add(total, value.to(wide.dtype) - wide, alpha=weight)
    return total.to(newest.dtype)


@dataclass(frozen=True)
class Forecast:
    """Extrapolates the stored tensors to the step at hand; order 0 reuses the newest as it is.

    Attributes:
        order: 0 to 3; the history holds order + 1 computed steps, and fewer of them give a lower order.
        basis: "newton" (exact), "ladder" (as published) or "hermite".
        coordinate: "step", "timestep" or "sigma": the axis along which features are taken to be smooth.
        max_gain: the order is lowered until sum |w_k|, by which errors of stored tensors are amplified, is at most
            this; None for no limit. Order 1 one step ahead of two equally spaced points has gain 3, order 2 has 7.
        sigma: contraction of the Hermite basis.
    """

    order: int = 1
    basis: str = "newton"
    coordinate: str = "step"
    max_gain: float | None = None
    sigma: float = 0.5
    depth: int = field(init=False, repr=False, compare=False)  # how many computed steps the history must hold
    needs_probe: ClassVar[bool] = False

    def __post_init__(self) -> None:
        take(self, one_of(0, 1, 2, 3), "order", form=GOT)
        if self.basis not in BASES:
            raise unknown("basis", str(self.basis), BASES)
        if self.coordinate not in COORDINATES:
            raise unknown("coordinate", str(self.coordinate), COORDINATES)
        take(self, number(1, words="at least 1").or_none(), "max_gain", form=GOT)
        take(self, NUMBER, "sigma", form=GOT)
        object.__setattr__(self, "depth", self.order + 1)  # the one way to set a field of a frozen dataclass

    def _basis(self, coordinates: Sequence[float], at: float) -> list[float]:
        if self.basis == "hermite":
            return hermite_weights(coordinates, at, self.sigma)
        return BASES[self.basis](coordinates, at)

    def pick(self, history: Sequence[Sample], at: float) -> tuple[list[Sample], list[float]]:
        """The samples that take part, newest last, and their weights.

        Of steps at one coordinate (schedulers repeat timesteps) only the newest takes part.
        """
        samples: list[Sample] = []
        for sample in reversed(history):
            if len(samples) < self.depth and all(sample.at != other.at for other in samples):
                samples.insert(0, sample)
        weights = self._basis([s.at for s in samples], at)
        while self.max_gain is not None and len(samples) > 1 and sum(map(abs, weights)) > self.max_gain:
            del samples[0]
            weights = self._basis([s.at for s in samples], at)
        return samples, weights

    def predict(
        self, history: Sequence[Sample], at: float, probe: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """What the streams would be at coordinate `at`; `history` is not empty, newest last."""
        if self.order == 0:
            return history[-1].values
        samples, weights = self.pick(history, at)
        return tuple([combine(column, weights) for column in zip(*(s.values for s in samples), strict=True)])


REUSE = Forecast(order=0)
