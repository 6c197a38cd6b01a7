"""Adams' methods against closed forms, ODEs with known solutions, and k-diffusion's own weights."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from diffaccel.solvers.adams import Adams, Course, Node, misses
from diffaccel.solvers.weights import integral_weights

NODES = (0.9, 0.75, 0.5, 0.42)


def truth(s: float) -> float:
    return 2 * s + math.sin(3 * s) / 3


def solve(adams: Adams, levels: list[float]) -> torch.Tensor:
    """The error at the end of dx/ds = 2 + cos(3 s)."""
    x, course = torch.tensor([[truth(levels[0])]], dtype=torch.float64), Course()
    for here, end in pairwise(levels):
        now = Node(here, 2 + math.cos(3 * here) + 0 * x)
        course = adams.advance(course, now, misses(course.nodes, now), end)
        assert course.added is not None
        x = x + course.added
    return (x - truth(levels[-1])).abs().max()


def uneven(count: int) -> list[float]:
    """From 1 to 0, steps of different lengths."""
    return [(1 - k / count) ** 1.5 for k in range(count + 1)]


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_polynomials_are_integrated_exactly(count: int) -> None:
    nodes = NODES[:count]
    for power in range(count):
        weights = integral_weights(nodes, 0.6, 0.1)
        exact = (0.1 ** (power + 1) - 0.6 ** (power + 1)) / (power + 1)
        assert sum(w * node**power for w, node in zip(weights, nodes, strict=True)) == pytest.approx(exact, abs=1e-12)
    beyond = sum(w * node**count for w, node in zip(integral_weights(nodes, 0.6, 0.1), nodes, strict=True))
    assert abs(beyond - (0.1 ** (count + 1) - 0.6 ** (count + 1)) / (count + 1)) > 1e-4  # and no more than that


def test_on_equal_steps_they_are_the_textbook_ones() -> None:
    h = -0.1
    nodes = [1.0, 0.9, 0.8]
    assert integral_weights(nodes, 0.8, 0.7) == pytest.approx([h * w / 12 for w in (5, -16, 23)])
    assert integral_weights(nodes[1:], 0.8, 0.7) == pytest.approx([h * w for w in (-0.5, 1.5)])
    assert integral_weights([0.9, 0.8, 0.7], 0.8, 0.7) == pytest.approx([h * w / 12 for w in (-1, 8, 5)])


def test_they_are_those_of_the_lms_scheduler() -> None:
    """diffusers' LMSDiscreteScheduler integrates the same polynomial by quadrature."""
    from diffusers import LMSDiscreteScheduler

    scheduler = LMSDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    scheduler.set_timesteps(10)
    at = scheduler.sigmas.tolist()
    theirs = [scheduler.get_lms_coefficient(3, 5, k) for k in range(3)]  # newest first
    assert integral_weights([at[3], at[4], at[5]], at[5], at[6]) == pytest.approx(theirs[::-1], rel=1e-3)


# ---- order of convergence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adams", "order"),
    [(Adams(1, False), 1), (Adams(2, False), 2), (Adams(3, False), 2), (Adams(2, True), 2), (Adams(), 2)],
    ids=["Euler", "AB2", "AB3", "ABM2", "auto"],
)
def test_the_error_falls_with_the_order(adams: Adams, order: int) -> None:
    """The first step is one of Euler's, which leaves order 2 to all others."""
    coarse, fine = solve(adams, uneven(40)), solve(adams, uneven(80))
    assert 2 ** (order - 0.35) < coarse / fine < 2 ** (order + 1.3)


def test_the_corrector_is_worth_it() -> None:
    """At equal numbers of evaluations; and hindsight takes it on a smooth ODE."""
    without, corrected = solve(Adams(2, False), uneven(14)), solve(Adams(2, True), uneven(14))
    assert corrected < without / 2
    assert torch.equal(solve(Adams(), uneven(14)), corrected)


# ---- stiffness -----------------------------------------------------------------------------------------------------


def equal(count: int) -> list[float]:
    return [1 - k / count for k in range(count + 1)]


@pytest.mark.parametrize(("z", "best"), [(0.8, Adams(2, False)), (1.5, Adams(1, False))])
def test_hindsight_takes_what_is_stable(z: float, best: Adams) -> None:
    """A contraction z per step: a line with the corrector is stable to 6/11, without it to 1; Euler to 2."""
    count = 60
    levels, rate = equal(count), z * count

    def disturbed(adams: Adams) -> float:
        """How far a disturbance at the start is from being forgotten at the end."""
        x, course = torch.ones(1, 1, dtype=torch.float64), Course()
        for here, end in pairwise(levels):
            now = Node(here, rate * x)
            course = adams.advance(course, now, misses(course.nodes, now), end)
            assert course.added is not None
            x = x + course.added
        return float(x.abs().max())

    assert disturbed(Adams(2, True)) > 10  # explodes
    assert disturbed(best) < 1e-3
    assert disturbed(Adams()) < 1e-3


# ---- batches -------------------------------------------------------------------------------------------------------


def test_each_sample_decides_for_itself() -> None:
    """A smooth sample beside a stiff one: each goes its way as it would alone."""
    levels, rates = equal(20), torch.tensor([[0.5], [30.0]], dtype=torch.float64)

    def run(rows: slice) -> torch.Tensor:
        rate = rates[rows]
        x, course = torch.ones_like(rate), Course()
        for here, end in pairwise(levels):
            now = Node(here, rate * (x - math.sin(here)) + math.cos(here))
            course = Adams().advance(course, now, misses(course.nodes, now), end)
            assert course.added is not None and course.degrees is not None
            x = x + course.added
        return torch.cat([x, course.degrees[:, None].double()], 1)

    both = run(slice(None))
    assert torch.equal(both, torch.cat([run(slice(0, 1)), run(slice(1, 2))]))
    assert both[0, 1] == 1 and both[1, 1] == 0


def test_misses_are_relative_and_per_degree() -> None:
    nodes = (Node(1.0, torch.tensor([[1.0], [2.0]])), Node(0.8, torch.tensor([[1.2], [2.0]])))
    now = Node(0.6, torch.tensor([[1.4], [4.0]]))
    assert misses(nodes, now).tolist() == [pytest.approx([0.2 / 1.4, 0.5]), pytest.approx([0.0, 0.5], abs=1e-6)]
    assert misses((), now).shape == (0, 2)
