"""Step control: a step cache seen as an ODE solver that chooses its own steps. Pure functions.

At a computed step the forecast from the computed steps before it is compared with what the model said; from that
error follows how far the next forecasts may go. The predictor's own error steers, as in Milne's device: there is no
second model call and no probe. Kin: k-diffusion's `dpm_adaptive` and the step controllers of Hairer, Norsett and
Wanner (Solving Ordinary Differential Equations I, II.4 and III.5); the power law over gaps is our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .forecast import Sample, combine, trusted
from .newton import newton_weights

DEPTH = 4  # computed outputs that are kept: enough for forecasts and interpolations of order 3
FLOOR = 1e-6  # relative errors below are not believed
GROWTH = 3  # a gap is at most so many times as long as the one before it: one lucky estimate opens no abyss
SHARE = 0.28  # of a loop's steps, the longest gap unless told


class Track(NamedTuple):
    """What is known along one trajectory. Replaced, never written into.

    Attributes:
        history: outputs of computed steps, oldest first, each at its noise level.
        upto: the next step that is to be computed; those before it are forecast.
        order: of these forecasts.
        error: what the last computed step's forecast had missed, relative; None where there was none.
        spent: what the planned gap is expected to cost, in units of the tolerance.
        at: the last computed step.
    """

    history: tuple[Sample, ...] = ()
    upto: int = 0
    order: int = 0
    error: float | None = None
    spent: float = 0.0
    at: int = 0


class Levels(NamedTuple):
    """The noise levels of a loop: where outputs are smooth, and what an error at a step costs.

    Attributes:
        at: per step, the noise level along which outputs are extrapolated.
        cost: per step, by how much a relative error of the output of 1 moves the latents, in units of the model's
            own scale: for flow models the length of the step in sigma.
    """

    at: tuple[float, ...]
    cost: tuple[float, ...]


def nodes(history: Sequence[Sample], order: int) -> Sequence[Sample]:
    """The samples that a forecast of this order rests on, newest last."""
    return history[-1:] if order == 0 else trusted(history)[-(order + 1) :]


def forecast(history: Sequence[Sample], order: int, at: float) -> torch.Tensor:
    """The output at noise level `at`, extrapolated from the newest order + 1 samples, in their dtype and shape."""
    known = nodes(history, order)
    return combine([s.values[0] for s in known], newton_weights([s.at for s in known], at))


def interpolated(history: Sequence[Sample], now: Sample, order: int, at: float) -> torch.Tensor:
    """The output at a skipped step, from the samples before it and the computed one after it."""
    known = (*history, now)[-(order + 1) :]
    return combine([s.values[0] for s in known], newton_weights([s.at for s in known], at))


def misses(history: Sequence[Sample], now: Sample, orders: Sequence[int]) -> torch.Tensor:
    """By how much a forecast of each order would have missed the computed output: |forecast - v| / |v|, [orders].

    The norm is taken over each sample of the batch (dimension 0), and the worst one counts. Stays on the device.
    """
    truth = now.values[0].flatten(1).float()
    size = torch.linalg.vector_norm(truth, dim=1)
    found = [forecast(history, order, now.at).flatten(1).float() - truth for order in orders]
    return torch.stack([(torch.linalg.vector_norm(miss, dim=1) / size).max() for miss in found])


def gain(history: Sequence[Sample], order: int, at: float) -> float:
    """By how much independent rounding of the samples grows in a forecast: sqrt(1 + sum of squared weights)."""
    known = nodes(history, order)
    return math.sqrt(1.0 + sum(w * w for w in newton_weights([s.at for s in known], at)))


@dataclass(frozen=True)
class StepControl:
    """The rules by which the next computed step is chosen.

    Attributes:
        tolerance: what the forecasts of one gap may move the latents by, in units of `Levels.cost`.
        order: of the forecasts, 0 to 3; None: chosen at each computed step by what its history tells.
        max_gap: the next computed step is at most so many steps away; None: `SHARE` of the loop's.
        noise: relative rounding error of one output of the model (0 in float32): not chased.
    """

    tolerance: float
    order: int | None = None
    max_gap: int | None = None
    noise: float = 0.0

    @property
    def orders(self) -> tuple[int, ...]:
        """Orders that are compared at each computed step."""
        return (0, 1, 2) if self.order is None else (self.order,)

    def walk(self, index: int, levels: Levels, error: float, order: int, span: tuple[float, int]) -> tuple[int, float]:
        """(the next step to compute after `index`, what the forecasts up to it are expected to cost).

        `error` is that of a forecast over `span` (noise levels, steps); over a distance d it is taken to be
        error * (d / span) ** (order + 1). The last step is computed in any case.
        """
        spent, step, last = 0.0, index + 1, len(levels.cost) - 1
        most = self.max_gap or max(2, round(SHARE * len(levels.cost)))
        while step < last and step - index < min(most, GROWTH * span[1]):
            reach = abs(levels.at[step] - levels.at[index]) / span[0]
            more = levels.cost[step] * error * reach ** (order + 1)
            if spent + more > self.tolerance:
                break
            spent += more
            step += 1
        return step, spent

    def choose(
        self, index: int, levels: Levels, found: dict[int, float], span: tuple[float, int]
    ) -> tuple[int, int, float]:
        """(order, next step to compute, expected cost) from the errors found per order.

        The order that reaches farthest, and of those that reach as far the one that is expected to miss least: low
        orders where guidance makes the outputs stiff or gaps are long, high ones where they are smooth.
        """
        plans = {order: self.walk(index, levels, error, order, span) for order, error in found.items()}
        best = max(plans, key=lambda order: (plans[order][0], -plans[order][1]))
        return best, *plans[best]

    def begin(self, now: Sample, index: int) -> Track:
        """After a computed step that nothing can be said about yet."""
        return Track((now,), index + 1, at=index)

    def advance(self, track: Track, now: Sample, index: int, levels: Levels, found: Sequence[float]) -> Track:
        """After a computed step, `found` being its `misses` for `orders`; the first two steps are taken on faith."""
        history = (*track.history, now)[-DEPTH:]
        if len(track.history) < 2:
            return Track(history, index + 1, at=index)
        span = (abs(now.at - track.history[-1].at), index - track.at)
        errors = {}
        for order, raw in zip(self.orders, found, strict=True):
            rounding = self.noise * gain(track.history, order, now.at) if self.noise else 0.0
            errors[min(order, len(history) - 1)] = max(math.sqrt(max(raw * raw - rounding * rounding, 0.0)), FLOOR)
        order, upto, spent = self.choose(index, levels, errors, span)
        return Track(history, upto, order, errors[order], spent, index)
