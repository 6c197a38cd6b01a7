"""Step control: a step cache seen as an ODE solver that chooses its own steps. Pure functions.

At a computed step the forecast from the computed steps before it is compared with what the model said; from that
error follows how far the next forecasts may go. The predictor's own error steers, as in Milne's device: there is no
second model call and no probe. Kin: k-diffusion's `dpm_adaptive` and the step controllers of Hairer, Norsett and
Wanner (Solving Ordinary Differential Equations I, II.4 and III.5); the power law over gaps is our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .forecast import Sample
from .hindsight import FLOOR, Gram, Guess, guesses, missed

DEPTH = 4  # computed outputs that are kept: enough for forecasts and interpolations of order 3
GROWTH = 2  # a gap is at most so many times as long as the one before it: one lucky estimate opens no abyss
AHEAD, LEAST, MOST = 3, 0.1, 3.0  # see `StepControl.thrifty`
SHARE = 0.28  # of a loop's steps, the longest gap unless told
KEPT_SHARE, KEPT_GROWTH = 0.5, 3  # where a promise about the picture steers instead
TORN = 0.7  # where a gap's forecast missed by more, what came of it is no ground for a correction
TAIL = 0.5  # of the tolerance: what the forecasts up to a loop's end may cost, which nothing corrects


class Track(NamedTuple):
    """What is known along one trajectory. Replaced, never written into.

    Attributes:
        history: outputs of computed steps, oldest first, each at its noise level.
        upto: the next step that is to be computed; those before it are forecast.
        shares: of the terms of these forecasts, see `hindsight`.
        power: with which their errors are taken to grow with distance.
        error: what the last computed step's forecast had missed, relative; None where there was none.
        spent: what the planned gap is expected to cost, in units of the tolerance.
        at: the last computed step.
        done: computed steps so far.
        paid: sum over the gaps so far of the squares of what their forecasts really cost, in units of the tolerance.
        gaps: how many there were.
    """

    history: tuple[Sample, ...] = ()
    upto: int = 0
    shares: tuple[float, ...] = ()
    power: float = 1.0
    error: float | None = None
    spent: float = 0.0
    at: int = 0
    done: int = 0
    paid: float = 0.0
    gaps: int = 0

    @property
    def price(self) -> float | None:
        """What a gap has cost so far, root mean square: the tolerance that was really kept. None before any."""
        return math.sqrt(self.paid / self.gaps) if self.gaps else None


class Levels(NamedTuple):
    """The noise levels of a loop: where outputs are smooth, and what an error at a step costs.

    Attributes:
        at: per step, the noise level along which outputs are extrapolated.
        cost: per step, by how much a relative error of the output of 1 moves the latents, in units of the model's
            own scale: for flow models the length of the step in sigma.
    """

    at: tuple[float, ...]
    cost: tuple[float, ...]


def cost_of(start: int, end: int, levels: Levels, guess: Guess) -> float:
    """What the forecasts between two computed steps cost, in units of the tolerance."""
    steps = range(start + 1, end)
    reach = [abs(levels.at[step] - levels.at[start]) / guess.span for step in steps]
    return sum(levels.cost[s] * guess.error * math.pow(r, guess.power) for s, r in zip(steps, reach, strict=True))


@dataclass(frozen=True)
class StepControl:
    """The rules by which the next computed step is chosen.

    Attributes:
        tolerance: what the forecasts of one gap may move the latents by, in units of `Levels.cost`.
        order: of the forecasts, 0 to 3; None: chosen at each computed step by what its history tells.
        max_gap: the next computed step is at most so many steps away; None: `SHARE` of the loop's.
        noise: relative rounding error of one output of the model (0 in float32): not chased.
        max_steps: computed steps of a loop, whatever the tolerance; None: as many as it takes.
        kept: the tolerance is to hold for what gaps really cost, which a forecast may have underrated.
    """

    tolerance: float
    order: int | None = None
    max_gap: int | None = None
    noise: float = 0.0
    max_steps: int | None = None
    kept: bool = False

    def walk(self, index: int, levels: Levels, guess: Guess, room: int) -> tuple[int, float]:
        """(the next step to compute after `index`, what the forecasts up to it are expected to cost).

        The error of a forecast over a distance d is taken to be error * (d / span) ** power. No single forecast may
        miss by more than the cube root of the tolerance either: where guidance is strong, early steps cost little by
        their length and decide what the picture shows. Nothing corrects the forecasts up to the loop's end, so that
        the last step is reused only where these cost at most `TAIL` of the tolerance. The gap is at most `room` steps.
        """
        spent, step, count = 0.0, index + 1, len(levels.cost)
        worst = self.tolerance ** (1 / 3)
        while step < count and step - index < room:
            miss = guess.error * math.pow(abs(levels.at[step] - levels.at[index]) / guess.span, guess.power)
            more = levels.cost[step] * miss
            allowed = self.tolerance * (TAIL if step == count - 1 else 1.0)
            if spent + more > allowed or miss > worst:
                break
            spent += more
            step += 1
        return step, spent

    def choose(self, index: int, levels: Levels, guesses: Sequence[Guess], room: int) -> tuple[Guess, int, float]:
        """(the forecast to use, next step to compute, expected cost).

        The order that reaches farthest, and of those that reach as far the one that is expected to miss least: low
        orders where guidance makes the outputs stiff or gaps are long, high ones where they are smooth.
        """
        best, far, least = guesses[0], 0, math.inf
        for guess in guesses:
            step, spent = self.walk(index, levels, guess, room)
            if step > far or (step == far and spent < least):
                best, far, least = guess, step, spent
        return best, far, least

    def room(self, index: int, levels: Levels, before: int, left: int | None) -> int:
        """The longest gap allowed after one of `before` steps, with `left` computed steps to go (None: any number)."""
        count = len(levels.cost)
        share, growth = (KEPT_SHARE, KEPT_GROWTH) if self.kept else (SHARE, GROWTH)
        most = min(self.max_gap or max(2, round(share * count)), growth * before)
        return most if left is None else max(most, math.ceil((count - 1 - index) / max(left, 1)))

    def fitted(self, index: int, levels: Levels, guesses: Sequence[Guess], before: int, left: int) -> StepControl:
        """These rules with the tolerance raised until the rest of the loop takes at most `left` computed steps.

        The rest is foreseen as if errors went on by the same power law.
        """

        def fits(tolerance: float) -> bool:
            return replace(self, tolerance=tolerance).count(index, levels, guesses, before, left) <= left

        low = high = max(self.tolerance, 1e-6)
        while not fits(high) and high < 1e6:
            low, high = high, high * 4.0
        for _ in range(6 if high > low else 0):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return replace(self, tolerance=high if high > self.tolerance else self.tolerance)

    def count(self, index: int, levels: Levels, guesses: Sequence[Guess], before: int, left: int) -> int:
        """Computed steps after `index`, foreseen."""
        last, computed = len(levels.cost) - 1, 0
        while index < last:
            _, step, _ = self.choose(index, levels, guesses, self.room(index, levels, before, left - computed))
            if step > last:
                break
            distance = abs(levels.at[step] - levels.at[index])
            guesses = [guess.over(distance) for guess in guesses]
            before, index, computed = step - index, step, computed + 1
        return computed

    def begin(self, now: Sample, index: int, done: int = 0) -> Track:
        """After a computed step that nothing can be said about yet; `done` were computed before it."""
        return Track((now,), index + 1, at=index, done=done + 1)

    def advance(self, track: Track, now: Sample, index: int, levels: Levels, found: Sequence[Gram]) -> Track:
        """After a computed step, `found` being what `hindsight.misses` said for `orders`, one for each sample.

        The second step of a loop knows of reuse as it is alone, and overrates its error: the first step bends most.
        """
        before, paid, gaps = index - track.at, track.paid, track.gaps
        foreseen = guesses(track.history, now, found, self.order, self.noise)
        if before > 1:
            raw = missed(found, track.shares if self.order is None else ())
            truth = foreseen[-1]._replace(error=max(raw, FLOOR), power=track.power)
            paid, gaps = paid + cost_of(track.at, index, levels, truth) ** 2, gaps + 1
        control, left = self.thrifty(paid, gaps), None
        if self.max_steps is not None:
            left = self.max_steps - track.done - 1
            control = control.fitted(index, levels, foreseen, before, left)
        guess, upto, spent = control.choose(index, levels, foreseen, self.room(index, levels, before, left))
        if left is not None and left <= 0:
            upto = len(levels.cost)
        history = (*track.history, now)[-DEPTH:]
        done = track.done + 1
        return Track(history, upto, guess.shares, guess.power, guess.error, spent, index, done, paid, gaps)

    def torn(self, track: Track, found: Sequence[Gram]) -> bool:
        """Did the forecast of the gap that ends here miss so much that correcting the gap would do harm?

        The output that is known now was computed from what the forecasts led to. Under strong guidance a long gap
        leads far away, and that output tells of another place than the one the sampler would be sent back over.
        """
        return bool(found) and missed(found, track.shares if self.order is None else ()) > TORN

    def thrifty(self, paid: float, gaps: int) -> StepControl:
        """These rules, if the tolerance is `kept`, with one that makes up for what the gaps so far really cost.

        So that the root mean square over these and `AHEAD` more comes out at the tolerance again: lower where they
        cost more than foreseen, and higher where they cost less.
        """
        if not self.kept or gaps == 0:
            return self
        rest = ((gaps + AHEAD) * self.tolerance**2 - paid) / AHEAD
        tolerance = min(max(math.sqrt(max(rest, 0.0)), LEAST * self.tolerance), MOST * self.tolerance)
        return replace(self, tolerance=tolerance)
