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

Gram = Sequence[Sequence[float]]  # see `misses`


def polynomials(history: Sequence[Sample], highest: int, at: float) -> list[list[float]]:
    """Weights at noise level `at` of the polynomials P_0 to P_highest, each over the whole history, newest last.

    P_k goes through the newest k + 1 trusted samples, or through fewer where there are not so many.
    """
    coordinates = [sample.at for sample in history]
    width, usable = len(history), len(trusted(history))
    rows = [[0.0] * (width - 1) + [1.0]]
    for order in range(1, highest + 1):
        count = min(order + 1, usable)
        rows.append([0.0] * (width - count) + newton_weights(coordinates[width - count :], at))
    return rows


def forecast_weights(history: Sequence[Sample], shares: Sequence[float], at: float) -> list[float]:
    """Weights of the samples, newest last; they sum to 1.

    The forecast is P_0 + sum_k shares[k-1] * (P_k - P_{k-1}): its order is the number of shares, where the history is
    long enough.
    """
    rows = polynomials(history, len(shares), at)
    total = rows[0]
    for share, (lower, upper) in zip(shares, pairwise(rows), strict=True):
        for i, (low, up) in enumerate(zip(lower, upper, strict=True)):
            total[i] += share * (up - low)
    return total


def forecast(history: Sequence[Sample], shares: Sequence[float], at: float) -> torch.Tensor:
    """The output at noise level `at`, in the dtype and shape of the samples. One weighted sum."""
    known = history[-(len(shares) + 1) :]
    return combine([s.values[0] for s in known], forecast_weights(known, shares, at))


def interpolated(history: Sequence[Sample], now: Sample, order: int, at: float) -> torch.Tensor:
    """The output at a skipped step, from the samples before it and the computed one after it."""
    known = (*history, now)[-(order + 1) :]
    return combine([s.values[0] for s in known], newton_weights([s.at for s in known], at))


def misses(history: Sequence[Sample], now: Sample, order: int | None) -> torch.Tensor:
    """What forecasts would have missed of the computed output v, relative to |v| of each sample of its batch.

    Returns inner products on the device, float32: of the miss of the polynomial of this order with itself,
    [samples, 1, 1]; or, with None, of the miss of plain reuse and the terms P_1 - P_0 and P_2 - P_1,
    [samples, 3, 3].
    """
    values = [sample.values[0].flatten(1).float() for sample in history]
    truth = now.values[0].flatten(1).float()
    rows = polynomials(history, 2 if order is None else order, now.at)
    if order is not None:
        found = [combine(values, rows[order]) - truth]
    else:
        found = [values[-1] - truth, _spread(values, rows[1], rows[0]), _spread(values, rows[2], rows[1])]
    stack = torch.stack(found, 1) / torch.linalg.vector_norm(truth, dim=1)[:, None, None]
    return torch.bmm(stack, stack.transpose(1, 2))


def _spread(values: Sequence[torch.Tensor], upper: Sequence[float], lower: Sequence[float]) -> torch.Tensor:
    """The difference of two weighted sums, written as differences from the newest value."""
    total = torch.zeros_like(values[-1])
    for value, up, low in zip(values[:-1], upper, lower, strict=False):
        if up != low:
            total = torch.add(total, value - values[-1], alpha=up - low)
    return total


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
        return Guess(self.shares, self.error * math.pow(distance / self.span, self.power), distance, self.power)


def best_shares(grams: Sequence[Gram], order: int) -> tuple[float, ...]:
    """Shares of the first `order` terms (1 or 2), each in 0..1, that would have missed least over all samples.

    `grams` are those of `misses` of all orders. Least squares, held to 0..1 afterwards; a term that says nothing has
    no share.
    """
    x = y = a = b = c = 0.0
    for (_, miss_one, miss_two), (_, one, both), (_, _, two) in grams:
        x, y, a, b, c = x - miss_one, y - miss_two, a + one, b + both, c + two
    if order == 1:
        return (_share(x, a),)
    ridge = 1e-6 * (a + c) / 2
    a, c = a + ridge, c + ridge
    whole = a * c - b * b
    return (_share(c * x - b * y, whole), _share(a * y - b * x, whole))


def _share(part: float, whole: float) -> float:
    value = part / whole if whole > 0 else 0.0
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def missed(grams: Sequence[Gram], shares: Sequence[float]) -> float:
    """By how much a forecast with these shares would have missed, relative; of the worst sample."""
    worst, weights = 0.0, (1.0, *shares)
    for gram in grams:
        square = 0.0
        for i, left in enumerate(weights):
            for j, right in enumerate(weights):
                square += left * right * gram[i][j]
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
    span, found = abs(now.at - history[-1].at), []
    if order is not None:
        reached = min(order + 1, len(trusted((*history, now)))) - 1
        found.append(Guess(FULL[:order], missed(grams, ()), span, reached + 1.0))
    else:
        for terms in range(min(len(trusted(history)), 3)):  # a young history has none, and says nothing about any
            shares = best_shares(grams, terms) if terms else ()
            found.append(Guess(shares, missed(grams, shares), span, 1.0 + sum(shares)))
    for i, guess in enumerate(found):
        rounding = noise * gain(history, guess.shares, now.at) if noise else 0.0
        if math.isfinite(guess.error):
            error = math.sqrt(max(guess.error**2 - rounding**2, FLOOR**2))
            found[i] = Guess(guess.shares, error, span, guess.power)
    return found


def gain(history: Sequence[Sample], shares: Sequence[float], at: float) -> float:
    """By how much independent rounding of the samples grows in a forecast: sqrt(1 + sum of squared weights)."""
    return math.sqrt(1.0 + sum(w * w for w in forecast_weights(history, shares, at)))
