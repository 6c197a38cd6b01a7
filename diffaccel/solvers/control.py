"""Noise levels chosen as the run goes, to a tolerance and within a number of evaluations. Pure functions.

Steps are measured along a coordinate u in which trajectories are about evenly hard. By how much the newest slope was
missed by its forecasts says what a step of that length costs (Milne's device, as in `extrapolation.step_control`), a
power law what a longer or a shorter one would; the first step, of which nothing is known, is small (compare Hairer,
Norsett and Wanner, Solving Ordinary Differential Equations I, II.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .levels import Ode

# u is put together from t, at which a grid of shift BEGIN has a noise, the same seen from the other end, and the noise
# itself: about evenly hard on the trained testbeds, which bend at full noise most, and at none again.
BEGIN, END = 4.0, 3.0
SHARES = (0.4, 0.3)  # of the first and the second; the rest is the noise's
FIRST = 0.6  # of an even step, the first one where the tolerance asks for more evaluations than there are
GROWTH = 2.0  # a step is at most so many times as long as the one before it
BEND = 100.0  # |dv/ds| / |v| at full noise, for the first step
EASE = (0.8, 1.25)  # by how much a step differs from an even one for being harder or easier than those before it
FLOOR = 1e-9
TOLERANCE = 0.015  # unless told


class Pace(NamedTuple):
    """What the steps so far were like.

    Attributes:
        step: length of the newest one along u; None before the first.
        cost: what a relative error of 1 in its slope moves the latents by.
        hard: mean of the logarithms of how hard steps were, and `known`: of how many.
    """

    step: float | None = None
    cost: float = 0.0
    hard: float = 0.0
    known: int = 0


@dataclass(frozen=True)
class Control:
    """The rules.

    Attributes:
        tolerance: what the steps together may miss by, about, in units of the model's own scale. An error at the end
            goes with the power 2/3 of what each step of a method of order 2 misses by (its length in noise times the
            relative error of the slope it rests on): `each`.
    """

    tolerance: float

    @property
    def each(self) -> float:
        """What one step may miss by."""
        return float(self.tolerance**1.5)

    def choose(
        self, pace: Pace, ode: Ode, index: int, found: Sequence[float], nearest: Callable[[float], float]
    ) -> tuple[Pace, tuple[float, ...]]:
        """(pace, the levels of the steps after `index` and the end).

        `found` are the misses of degrees 0, 1, ... at the evaluation just made, the worst sample's; `nearest` says
        which level a timestep can stand for. Levels that are left over equal the end.
        """
        here, end, left = ode.at[index], ode.at[-1], len(ode.at) - 2 - index
        low, high = along(ode.noise(end)), along(ode.noise(here))
        whole = high - low
        even = whole / (left + 1)
        wanted = self.step(pace, ode.noise(here) - ode.noise(end), found)
        pace, ease = self.ease(pace, found)
        if wanted < even:  # more evaluations than there are
            parts, step = left + 1, max(wanted, even * (FIRST if pace.step is None else ease))
        else:
            parts = math.ceil(whole / wanted - 1e-6)
            step = whole / parts
        step, ahead = (whole, 0) if parts == 1 else (step, parts - 1)
        after = [(whole - step) * (1 - k / ahead) for k in range(ahead)]
        rest = [nearest(ode.at_noise(back(low + u))) for u in after]
        falling = [at for before, at in pairwise([here, *rest]) if abs(at - end) < abs(before - end)]
        levels = (*falling, *(end,) * (left + 1 - len(falling)))
        return pace._replace(step=step, cost=ode.cost(here, levels[0])), levels

    def step(self, pace: Pace, noise: float, found: Sequence[float]) -> float:
        """The longest step along u that keeps the tolerance, as far as can be told."""
        if pace.step is None or not found:
            return along(noise) - along(max(noise - math.sqrt(2 * self.each / BEND), 0.0))
        if len(found) < 2:
            return pace.step  # the first step bends most, and nothing else is known
        reach = [  # steps rest on lines, and are corrected with curves; a constant that foretold better is luck
            float((self.each / (max(miss, FLOOR) * max(pace.cost, FLOOR))) ** (1 / (degree + 2)))
            for degree, miss in enumerate(found)
        ]
        return pace.step * min(max(reach[1:]), GROWTH)

    def ease(self, pace: Pace, found: Sequence[float]) -> tuple[Pace, float]:
        """(pace with the newest step known, how much longer than an even step the next one may be).

        A step's error goes with the cube of its length: at equal errors steps are as long as the cube root tells.
        """
        if pace.step is None or len(found) < 2:
            return pace, 1.0
        hard = math.log(max(found[1], FLOOR) * max(pace.cost, FLOOR) / pace.step**3) / 3
        known = pace.known + 1
        mean = pace.hard + (hard - pace.hard) / known
        return pace._replace(hard=mean, known=known), min(max(math.exp((mean - hard) / 2), EASE[0]), EASE[1])


def along(noise: float) -> float:
    """u of a noise from 0 to 1: 0 at none, 1 at all."""
    first, second = SHARES
    mirrored = 1 - (1 - noise) / (END - (END - 1) * (1 - noise))
    return first * noise / (BEGIN - (BEGIN - 1) * noise) + second * mirrored + (1 - first - second) * noise


def back(u: float) -> float:
    """The noise at u, the inverse of `along`, by bisection to float64's last bits."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if along(middle) < u else (low, middle)
    return high if u >= 1.0 else low if u <= 0.0 else (low + high) / 2
