"""The pure half: which steps compute both branches, and what is said of the difference on the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from diffaccel.extrapolation.forecast import Forecast
from diffaccel.guidance.difference import BranchAction, DifferenceMemory, GuidanceSteps, difference, unconditional

LETTER = {BranchAction.BOTH: "B", BranchAction.REUSE: ".", BranchAction.OFF: "o"}


def pattern(steps: GuidanceSteps, total: int) -> str:
    """The acts of a whole loop."""
    last, letters = None, ""
    for step in range(total):
        act = steps.act(step, last)
        last = step if act is BranchAction.BOTH else last
        letters += LETTER[act]
    return letters


SIGMAS = (1.0, 0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "BBBBBBBB"),
        ({"interval": 2}, "B.B.B.B."),
        ({"interval": 3}, "B..B..B."),
        ({"interval": 100}, "B......."),
        ({"interval": 2, "last_steps": 1}, "B.B.B.BB"),
        ({"interval": 3, "first_steps": 2}, "BB..B..B"),
        ({"interval": 3, "first_steps": 2, "last_steps": 3}, "BB..BBBB"),
        ({"interval": 2, "last_steps": 20}, "BBBBBBBB"),
        ({"start": 0.25, "end": 0.75}, "ooBBBBoo"),
        ({"start": 0.25, "end": 0.75, "interval": 2}, "ooB.B.oo"),
        ({"start": 0.25, "interval": 3, "first_steps": 3, "last_steps": 1}, "ooB..B.B"),
        ({"start": 0.5, "end": 0.5}, "oooooooo"),
        ({"start": 1.0}, "oooooooo"),
        ({"sigma_low": 0.2, "sigma_high": 0.8, "sigmas": SIGMAS}, "ooBBBBoo"),
        ({"sigma_high": 0.8, "sigmas": SIGMAS, "interval": 2}, "ooB.B.B."),
        ({"sigma_low": 0.2, "sigmas": SIGMAS}, "BBBBBBoo"),
        ({"mask": (True, False, False, True, False, False, False, True), "interval": 2}, "B..B...B"),
        ({"mask": (True, *[False] * 7), "first_steps": 2, "last_steps": 1}, "BB.....B"),
        ({"mask": (True, *[False] * 7), "start": 0.25}, "ooB....."),
    ],
)
def test_which_steps(options: dict[str, Any], expected: str) -> None:
    assert pattern(GuidanceSteps(8, **options), 8) == expected


def test_an_unknown_number_of_steps() -> None:
    assert pattern(GuidanceSteps(None, interval=2), 5) == "B.B.B"


# ---- a fake trajectory whose differences are known in closed form ---------------------------------------

A, B, C = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3))


def left_out(order: int, coordinate: str, degree: int, interval: int) -> tuple[float, float]:
    """Largest error of u over all reused steps with a full history, and what order 0 would have missed by.

    The differences are a polynomial of `degree` in the coordinate; c itself moves without any rule.
    """
    sigmas = [1 / (1 + step / 5) for step in range(12)]
    at = sigmas if coordinate == "sigma" else [float(step) for step in range(12)]
    forecast, memory = Forecast(order, coordinate=coordinate), DifferenceMemory(0, None)
    steps = GuidanceSteps(12, interval=interval)
    worst = stale = 0.0
    for step in range(12):
        cond = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(50 + step), dtype=torch.float64)
        truth = A + (B * at[step] if degree else 0) + (C * at[step] ** 2 if degree > 1 else 0)
        if steps.act(step, memory.last) is BranchAction.BOTH:
            memory = memory.remember(step, at[step], difference((cond,), (cond - truth,)), forecast.depth)
            continue
        (uncond,) = unconditional((cond,), memory, BranchAction.REUSE, forecast, at[step])
        if len(memory.history) > order:
            worst = max(worst, float((uncond - (cond - truth)).abs().max()))
            stale = max(stale, float((memory.history[-1].values[0] - truth).abs().max()))
    return worst, stale


@pytest.mark.parametrize("coordinate", ["step", "sigma"])
@pytest.mark.parametrize(("order", "degree"), [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("interval", [2, 3])
def test_exact_where_the_difference_is_a_polynomial(order: int, degree: int, coordinate: str, interval: int) -> None:
    worst, stale = left_out(order, coordinate, degree, interval)
    assert worst < 1e-10
    assert (stale > 0.1) is (degree > 0)


@pytest.mark.parametrize(("order", "degree"), [(0, 1), (1, 2)])
def test_negative_control(order: int, degree: int) -> None:
    """A polynomial of a higher degree than the order is missed."""
    assert left_out(order, "step", degree, 2)[0] > 0.1


def test_order_0_is_the_stored_difference_to_the_last_bit() -> None:
    cond, uncond = torch.randn(2, 8), torch.randn(2, 8)
    memory = DifferenceMemory(0, None).remember(3, 3.0, difference((cond,), (uncond,)), 1)
    new = torch.randn(2, 8)
    (found,) = unconditional((new,), memory, BranchAction.REUSE, Forecast(0), 4.0)
    assert torch.equal(found, new - (cond - uncond))


def test_without_guidance_the_formula_gives_the_conditional_output() -> None:
    cond = torch.randn(2, 8)
    (uncond,) = unconditional((cond,), DifferenceMemory(0, None), BranchAction.OFF, Forecast(0), 0.0)
    assert uncond is not cond and torch.equal(uncond + 7.5 * (cond - uncond), cond)


def test_a_memory_is_never_written_into() -> None:
    first = DifferenceMemory(0, "like").remember(0, 0.0, (torch.ones(3),), 2)
    kept = copy.copy(first)
    second = (
        first.remember(1, 1.0, (torch.zeros(3),), 2).remember(2, 2.0, (torch.zeros(3),), 2).count(BranchAction.REUSE)
    )
    assert kept == first and len(first.history) == 1 and first.done == {BranchAction.BOTH: 1}
    assert [s.at for s in second.history] == [1.0, 2.0] and second.last == 2
    assert second.done == {BranchAction.BOTH: 3, BranchAction.REUSE: 1}
    assert second.bytes() == 2 * 3 * 4 and second.forget().bytes() == 0 and second.forget().last is None
