"""Noise levels chosen as the run goes, on an ODE with a known solution."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from diffaccel.core.sampling import EPSILON, FLOW
from diffaccel.solvers.adams import Adams, Course, Node, misses
from diffaccel.solvers.control import Control, Pace, along, back
from diffaccel.solvers.levels import Ode


def ode(count: int, shift: float = 1.0, kind: str = FLOW) -> Ode:
    """The loop of a scheduler with this shift."""
    at = [shift * t / (1 + (shift - 1) * t) for t in (1 - k / count for k in range(count))]
    return Ode((*at, 0.0), kind, False)


PHASES = torch.arange(8, dtype=torch.float64)[None]  # as many numbers in one sample, whose errors do not cancel


def truth(s: float) -> torch.Tensor:
    return (2 * s + PHASES).sin() + (0.1 + 0.02 * PHASES) * (math.exp(-12 * s) + math.exp(12 * (s - 1)))


def slope(s: float) -> torch.Tensor:
    return 2 * (2 * s + PHASES).cos() + 12 * (0.1 + 0.02 * PHASES) * (math.exp(12 * (s - 1)) - math.exp(-12 * s))


def run(loop: Ode, tolerance: float) -> tuple[float, list[float]]:
    """(error at the end, the levels met) of an ODE whose solution bends at full noise and at none."""
    control, course, pace, index = Control(tolerance), Course(), Pace(), 0

    x, at = truth(1.0), [1.0]
    while at[-1] > 0:
        here = loop.at[index]
        now = Node(here, slope(here))
        found = misses(course.nodes, now)
        pace, levels = control.choose(pace, loop, index, found.amax(1).tolist(), float)
        assert len(levels) == len(loop.at) - 1 - index
        loop = loop._replace(at=(*loop.at[: index + 1], *levels))
        course = Adams().advance(course, now, found, levels[0])
        assert course.added is not None
        x, index = x + course.added, index + 1
        at.append(levels[0])
    return float((x - truth(0.0)).norm()), at


def test_a_tolerance_ten_times_smaller_cuts_the_error_at_least_threefold() -> None:
    errors = [run(ode(1000), tolerance)[0] for tolerance in (1e-1, 1e-2, 1e-3, 1e-4)]
    assert all(fine < coarse / 3 for coarse, fine in pairwise(errors)), errors


def test_the_shift_is_only_a_grid() -> None:
    """Which levels the scheduler would have met does not matter, beyond how many."""
    assert run(ode(60, 1.0), 0.005) == run(ode(60, 3.0), 0.005)


def test_steps_are_short_where_the_solution_bends() -> None:
    at = run(ode(200), 0.002)[1]
    lengths = [a - b for a, b in pairwise(at)]
    assert max(lengths) > 4 * lengths[0] and max(lengths) > 2 * lengths[-1]
    even = [1 - k / (len(at) - 1) for k in range(len(at))]  # as many of the same length
    assert run_on(even) > 1.5 * run(ode(200), 0.002)[0]


def run_on(at: list[float]) -> float:
    """The error on levels that stay as they are."""
    loop = Ode(tuple(at), FLOW, False)
    course, x = Course(), truth(1.0)
    for index, here in enumerate(loop.at[:-1]):
        now = Node(here, slope(here))
        course = Adams().advance(course, now, misses(course.nodes, now), loop.at[index + 1])
        assert course.added is not None
        x = x + course.added
    return float((x - truth(0.0)).norm())


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 14])
def test_the_number_of_steps_is_a_ceiling(count: int) -> None:
    at = run(ode(count), 1e-9)[1]
    assert len(at) == count + 1  # all are needed
    assert all(b < a for a, b in pairwise(at)) and at[-1] == 0.0
    assert len(run(ode(max(count, 9)), 1.0)[1]) < 9  # and only those that are needed are taken


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.25, 0.8, 1.0])
def test_the_coordinate_has_an_inverse(noise: float) -> None:
    assert back(along(noise)) == pytest.approx(noise, abs=1e-12)
    assert along(0.0) == 0.0 and along(1.0) == pytest.approx(1.0)


def test_levels_of_k_diffusion_fall_to_where_the_scheduler_ends() -> None:
    loop = Ode((14.6, 8.0, 4.0, 2.0, 1.0, 0.5, 0.2, 0.0), EPSILON, True)
    _, levels = Control(1e-9).choose(Pace(), loop, 0, [], float)
    assert len(levels) == 7 and levels[-1] == 0.0
    assert all(b < a for a, b in zip((14.6, *levels), levels, strict=False))


def test_levels_that_no_timestep_stands_for_are_not_met_twice() -> None:
    """A scheduler whose timesteps are whole numbers, and few."""
    _, levels = Control(1e-9).choose(Pace(), ode(30), 0, [], lambda at: round(at * 10) / 10)
    met = [at for at in levels if at > 0]
    assert met == sorted(set(met), reverse=True) and met[0] < 1.0
