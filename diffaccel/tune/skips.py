"""What skipping steps does to the final latents, as weights on the outputs of a plain run. Pure, no model.

Write v_t for what goes into the scheduler at step t. Where t is skipped, the scheduler gets a forecast instead: a
weighted sum of the outputs before it. To first order the final latents are then off by

    sum over skipped t of  w_t s_t (forecast_t - v_t)  =  sum_j c_j v_j,

where w_t is the scheduler's response to the output of step t (the step's length, for Euler) and s_t how much of an
error made there is left at the end (`survival.py`). c are host numbers, so the squared error is c' G c with the Gram
matrix G of the outputs, and thousands of schedules a second can be judged.

A correction at the next computed step, a, interpolates the skipped outputs instead of extrapolating them. What is
taken back there has the survival of that step, not of the skipped one, so of the forecast's error s_t - s_a stays, and
a share `feedback` of s_t besides, since the denoiser saw latents that were off:

    w_t ((s_t - s_a + feedback s_t) (forecast_t - v_t) + s_a (interpolated_t - v_t)).

Steps between two computed ones, and the (order + 1) computed ones before, say all of what a gap costs: that is what
makes a dynamic program of it (`program.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..extrapolation.forecast import Forecast, Sample

Mask = tuple[bool, ...]
Nodes = tuple[int, ...]  # the computed steps that a forecast may rest on, oldest first


@dataclass(frozen=True, order=True)
class Method:
    """How skipped steps are answered: order of the forecast, and of the correction behind it (0: none)."""

    order: int
    correct: int = 0

    @property
    def depth(self) -> int:
        """So many computed steps are remembered."""
        return self.order + 1

    def __str__(self) -> str:
        return f"order {self.order}" + (f", correction {self.correct}" if self.correct else "")


def methods(orders: Sequence[int] = (0, 1, 2), corrections: Sequence[int] = (0, 1, 2)) -> list[Method]:
    """Every order with every correction that it allows: at most one above its own."""
    return [Method(order, correct) for order in orders for correct in corrections if correct <= order + 1]


class Contributions(NamedTuple):
    """Per skipped step, w_t (forecast - v_t) and w_t (interpolated - v_t) as weights, [N, N] each, and the computed
    step that makes it good (-1: none), [N]; 0 at computed steps."""

    told: np.ndarray
    between: np.ndarray
    made_good: np.ndarray

    def combination(self, survival: np.ndarray, feedback: float) -> np.ndarray:
        """c of the whole schedule, [N]."""
        later = np.where(self.made_good >= 0, survival[self.made_good], 0.0)
        stays = np.where(self.made_good >= 0, survival - later + feedback * survival, survival)
        return np.asarray(stays @ self.told + later @ self.between)


@dataclass
class Skips:
    """Weights of skipped stretches for one loop and one method.

    Attributes:
        axis: per step, the coordinate along which outputs are forecast: [N], no two alike.
        method: order and correction.
        response: w_t, [N].
        survival: s_t, [N]; None: every error stays as it is made.
        feedback: share of the forecasts' error that a correction leaves.
        wary: the loop begins at full noise, so that no slope rests on its first step and one more alone
            (`extrapolation.forecast.trusted`).
    """

    axis: Sequence[float]
    method: Method
    response: np.ndarray
    survival: np.ndarray | None = None
    feedback: float = 0.1
    wary: bool = True

    def __post_init__(self) -> None:
        self.steps = len(self.axis)
        self._left = np.ones(self.steps) if self.survival is None else self.survival
        self._forecast = Forecast(self.method.order, coordinate="sigma")
        self._interpolation = Forecast(self.method.correct, coordinate="sigma")
        self._place = {at: t for t, at in enumerate(self.axis)}
        self._rows: dict[tuple[Nodes, int], np.ndarray] = {}
        self._misses: dict[tuple[int, bool, Nodes, int], np.ndarray] = {}

    # ---- one skipped step -------------------------------------------------------------------------------

    def _missed(self, predictor: Forecast, nodes: Nodes, t: int, wary: bool) -> np.ndarray:
        """(what `predictor` says at t from these computed steps) - v_t, as weights, [N]."""
        key = predictor.order, wary, nodes, t
        if key not in self._misses:
            known = [Sample(self.axis[node], (), first=wary and node == 0) for node in nodes]
            samples, weights = predictor.pick(known, self.axis[t])
            row = np.zeros(self.steps)
            row[t] = -1.0
            for sample, weight in zip(samples, weights, strict=True):
                row[self._place[sample.at]] += weight
            self._misses[key] = row
        return self._misses[key]

    def _between(self, nodes: Nodes, after: int, t: int) -> np.ndarray:
        """The same for the interpolation that the computed step `after` makes possible."""
        return self._missed(self._interpolation, (*nodes[-self.method.correct :], after), t, False)

    # ---- a stretch --------------------------------------------------------------------------------------

    def corrects(self, after: int) -> bool:
        """Are steps before the computed step `after` (N: none comes) made good?"""
        return self.method.correct > 0 and after < self.steps

    def row(self, nodes: Nodes, after: int) -> np.ndarray:
        """c of the steps between the last of `nodes` and `after`, the next computed step (N: none comes), [N]."""
        key = nodes, after
        if key not in self._rows:
            told, left = np.zeros(self.steps), self._left
            for t in range(nodes[-1] + 1, after):
                forecast = self.response[t] * self._missed(self._forecast, nodes, t, self.wary)
                if not self.corrects(after):
                    told += left[t] * forecast
                    continue
                told += (left[t] - left[after] + self.feedback * left[t]) * forecast
                told += left[after] * self.response[t] * self._between(nodes, after, t)
            self._rows[key] = told
        return self._rows[key]

    # ---- a whole schedule -------------------------------------------------------------------------------

    def stretches(self, mask: Sequence[bool]) -> list[tuple[Nodes, int]]:
        """(computed steps remembered, next computed step) of every stretch of a schedule, first to last."""
        computed = [t for t, flag in enumerate(mask) if flag]
        ends = [*computed[1:], self.steps]
        return [
            (tuple(computed[max(0, place - self.method.order) : place + 1]), end) for place, end in enumerate(ends)
        ]

    def combination(self, mask: Sequence[bool]) -> np.ndarray:
        """c of a whole schedule, [N]."""
        return np.asarray(np.sum([self.row(nodes, after) for nodes, after in self.stretches(mask)], axis=0))

    def contributions(self, mask: Sequence[bool]) -> Contributions:
        """The schedule taken apart, for a fit of survival and feedback."""
        told, between = np.zeros((self.steps, self.steps)), np.zeros((self.steps, self.steps))
        made_good = np.full(self.steps, -1)
        for nodes, after in self.stretches(mask):
            for t in range(nodes[-1] + 1, after):
                told[t] = self.response[t] * self._missed(self._forecast, nodes, t, self.wary)
                if self.corrects(after):
                    between[t] = self.response[t] * self._between(nodes, after, t)
                    made_good[t] = after
        return Contributions(told, between, made_good)


def squared(rows: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """c' G c: [..., N] weights with [P, N, N] Gram matrices (or one [N, N]) to [..., P] (or [...])."""
    subscripts = "...n,nm,...m->..." if gram.ndim == 2 else "...n,pnm,...m->...p"
    return np.asarray(np.maximum(np.einsum(subscripts, rows, gram, rows, optimize=True), 1e-30))


def loss_db(rows: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Mean over prompts of the squared error in dB, [...]: lower is better; 1 is about 1 dB of PSNR."""
    return np.asarray(10 * np.log10(squared(rows, gram)).mean(axis=-1))
