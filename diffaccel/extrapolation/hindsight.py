"""Forecasts that learn from the last one: at a computed step the history says which forecast would have been best.

A forecast adds to the newest output shares of the terms of Newton's interpolation: all of them is the polynomial
itself, none is plain reuse. Once the true output is known, the shares that would have come nearest to it follow by
least squares, and the next forecast takes these. Where outputs are smooth they come out near 1; where strong guidance
makes them jerky, a full slope misses by more than no slope at all, and a part of it by less than either. Shares by
hindsight are our own; the terms are Newton's divided differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from .forecast import Sample, combine, trusted
from .newton import newton_weights

FLOOR = 1e-6  # relative errors below are not believed
FULL = (1.0, 1.0, 1.0)  # shares of a forecast that is the polynomial

Gram = Sequence[Sequence[float]]  # inner products of the misses of orders 0, 1, …


def nodes(history: Sequence[Sample], order: int) -> Sequence[Sample]:
    """The samples that a forecast of this order rests on, newest last."""
    return history[-1:] if order == 0 else trusted(history)[-(order + 1) :]


def forecast_weights(history: Sequence[Sample], shares: Sequence[float], at: float) -> list[float]:
    """Weights of the newest samples, newest last; they sum to 1.

    With P_k the polynomial through the newest k + 1 trusted samples, the forecast is P_0 + sum_k shares[k-1] *
    (P_k - P_{k-1}): its order is the number of shares, where the history is long enough.
    """
    rows = [newton_weights([s.at for s in nodes(history, order)], at) for order in range(len(shares) + 1)]
    width = max(len(row) for row in rows)
    wide = [[0.0] * (width - len(row)) + row for row in rows]
    total = wide[0]
    for share, (lower, upper) in zip(shares, pairwise(wide), strict=True):
        total = [t + share * (u - low) for t, u, low in zip(total, upper, lower, strict=True)]
    return total


def forecast(history: Sequence[Sample], shares: Sequence[float], at: float) -> torch.Tensor:
    """The output at noise level `at`, in the dtype and shape of the samples. One weighted sum."""
    weights = forecast_weights(history, shares, at)
    return combine([s.values[0] for s in history[-len(weights) :]], weights)


def interpolated(history: Sequence[Sample], now: Sample, order: int, at: float) -> torch.Tensor:
    """The output at a skipped step, from the samples before it and the computed one after it."""
    known = (*history, now)[-(order + 1) :]
    return combine([s.values[0] for s in known], newton_weights([s.at for s in known], at))


def misses(history: Sequence[Sample], now: Sample, orders: Sequence[int]) -> torch.Tensor:
    """How forecasts of each order, as whole polynomials, would have missed the computed output.

    Returns [samples, orders, orders], float32, on the device: for each sample of the batch (dimension 0) the inner
    products of (forecast - v) / |v|. The diagonal holds the squares of the relative errors.
    """
    truth = now.values[0].flatten(1).float()
    found = [forecast(history, FULL[:order], now.at).flatten(1).float() - truth for order in orders]
    stack = torch.stack(found, 1) / torch.linalg.vector_norm(truth, dim=1)[:, None, None]
    return torch.bmm(stack, stack.transpose(1, 2))


def gain(history: Sequence[Sample], shares: Sequence[float], at: float) -> float:
    """By how much independent rounding of the samples grows in a forecast: sqrt(1 + sum of squared weights)."""
    return math.sqrt(1.0 + sum(w * w for w in forecast_weights(history, shares, at)))


class Guess(NamedTuple):
    """A forecast and by how much it missed over a distance in noise levels.

    Attributes:
        shares: of the terms; their number is the order.
        error: relative.
        span: the distance.
        power: with which the error is taken to grow with distance.
    """

    shares: tuple[float, ...]
    error: float
    span: float
    power: float

    def over(self, distance: float) -> Guess:
        """The same, foreseen for another distance."""
        return self._replace(error=self.error * math.pow(distance / self.span, self.power), span=distance)


def best_shares(grams: Sequence[Gram], order: int) -> tuple[float, ...]:
    """Shares of the first `order` terms, each in 0..1, that would have missed least over all samples together.

    `grams` belong to orders 0, 1, 2, one per sample. Least squares, held to 0..1 afterwards; a term that says nothing
    has no share.
    """
    total = [[sum(gram[i][j] for gram in grams) for j in range(order + 1)] for i in range(order + 1)]

    def product(i: int, j: int) -> float:
        """Of term i and term j (0: the miss of plain reuse). Term k is the miss of order k - 1 less that of k."""
        left = [(0, 1.0)] if i == 0 else [(i - 1, 1.0), (i, -1.0)]
        right = [(0, 1.0)] if j == 0 else [(j - 1, 1.0), (j, -1.0)]
        return sum(a * b * total[p][q] for p, a in left for q, b in right)

    if order == 0:
        return ()
    if order == 1:
        size = product(1, 1)
        found = [product(0, 1) / size if size > 0 else 0.0]
    else:
        a, b, c = product(1, 1), product(1, 2), product(2, 2)
        ridge = 1e-6 * (a + c) / 2
        whole = (a + ridge) * (c + ridge) - b * b
        x, y = product(0, 1), product(0, 2)
        found = [((c + ridge) * x - b * y) / whole, ((a + ridge) * y - b * x) / whole] if whole > 0 else [0.0, 0.0]
    return tuple(min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0 for value in found)


def missed(grams: Sequence[Gram], shares: Sequence[float]) -> float:
    """By how much a forecast with these shares would have missed, relative; of the worst sample."""
    # P_0 + sum shares_k (P_k - P_{k-1}) as weights of the polynomials themselves
    weights = [1.0, *(0.0 for _ in shares)]
    for k, share in enumerate(shares):
        weights[k] -= share
        weights[k + 1] += share
    worst = 0.0
    for gram in grams:
        square = sum(a * b * gram[i][j] for i, a in enumerate(weights) for j, b in enumerate(weights))
        if not math.isfinite(square):
            return math.inf
        worst = max(worst, square)
    return math.sqrt(worst)


def guesses(
    history: Sequence[Sample], now: Sample, grams: Sequence[Gram], order: int | None, noise: float
) -> list[Guess]:
    """What is known about the next forecasts once `now` is: of one order, or of 0, 1 and 2 with shares by hindsight.

    With an order of its own a forecast is the whole polynomial. `noise`: relative rounding error of one output.
    """
    span = abs(now.at - history[-1].at)
    if order is not None:
        reached = len(nodes((*history, now), order)) - 1
        plans = [(FULL[:order], reached + 1.0, missed(grams, ()))]
    else:
        known = len(nodes(history, 2)) - 1  # terms: a young history has none, and says nothing about any
        choices = [best_shares(grams, k) for k in range(known + 1)]
        plans = [(shares, 1.0 + sum(shares), missed(grams, shares)) for shares in choices]
    found = []
    for shares, power, raw in plans:
        rounding = noise * gain(history, shares, now.at) if noise else 0.0
        error = math.sqrt(max(raw * raw - rounding * rounding, FLOOR * FLOOR)) if math.isfinite(raw) else math.inf
        found.append(Guess(shares, error, span, power))
    return found
