"""What skipping costs: closed forms, and every schedule of a short loop against the dynamic program."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from diffaccel.extrapolation.correction import corrected
from diffaccel.extrapolation.forecast import Forecast, Sample
from diffaccel.tune.program import best_schedules, descend, gap_costs, losses, swaps
from diffaccel.tune.skips import Method, Skips, methods, squared
from diffaccel.tune.survival import KNOTS, Damping, Seen, fit

STEPS = 8
SIGMAS = (1.0, 0.93, 0.85, 0.7, 0.62, 0.4, 0.3, 0.12)
LENGTHS = np.diff([*SIGMAS, 0.0])


def outputs_of(degree: int) -> np.ndarray:
    """Outputs [N, D] that are polynomials of the noise level."""
    powers = np.random.default_rng(0).normal(size=(degree + 1, 5))
    return np.stack([sum(p * s**k for k, p in enumerate(powers)) for s in SIGMAS])


def gram(outputs: np.ndarray) -> np.ndarray:
    return outputs @ outputs.T


def random_gram(prompts: int = 1, steps: int = STEPS) -> np.ndarray:
    """Smooth random outputs, [P, N, N]."""
    rng = np.random.default_rng(1)
    walks = rng.normal(size=(prompts, steps, 6)).cumsum(axis=1)
    return np.einsum("pnd,pmd->pnm", walks, walks)


def every_schedule(steps: int) -> list[tuple[bool, ...]]:
    return [
        tuple(t == 0 or t in rest for t in range(steps))
        for count in range(steps)
        for rest in combinations(range(1, steps), count)
    ]


# ---- closed forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degree", "order", "free"), [(0, 0, True), (1, 1, True), (2, 2, True), (1, 0, False), (2, 1, False)]
)
def test_a_polynomial_of_the_orders_degree_costs_nothing_to_skip(degree: int, order: int, free: bool) -> None:
    skips = Skips(SIGMAS, Method(order), LENGTHS)
    mask = tuple(t in (0, 1, 2, 4, 6) for t in range(STEPS))  # enough computed steps before the first skip
    cost = float(squared(skips.combination(mask), gram(outputs_of(degree))))
    assert cost < 1e-12 if free else cost > 1e-6


def test_no_slope_rests_on_the_first_step_and_one_more() -> None:
    """Unless the loop begins late, where the first step is as good as any."""
    mask = (True, True, False, True, True, True, True, True)
    row = Skips(SIGMAS, Method(1), LENGTHS).combination(mask)
    assert np.flatnonzero(row).tolist() == [1, 2] and row[1] == -row[2] == LENGTHS[2]
    assert row == pytest.approx(Skips(SIGMAS, Method(0), LENGTHS).combination(mask))
    late = Skips(SIGMAS, Method(1), LENGTHS, wary=False).combination(mask)
    assert float(squared(late, gram(outputs_of(1)))) < 1e-12


def test_a_correction_interpolates_so_that_degree_two_costs_what_the_feedback_leaves() -> None:
    mask, outputs = (True, True, True, False, False, True, True, True), outputs_of(2)
    free = Skips(SIGMAS, Method(1, 2), LENGTHS, feedback=0.0).combination(mask)
    assert float(squared(free, gram(outputs))) < 1e-12
    plain = Skips(SIGMAS, Method(1), LENGTHS).combination(mask)
    half = Skips(SIGMAS, Method(1, 2), LENGTHS, feedback=0.5).combination(mask)
    assert half @ outputs == pytest.approx(0.5 * plain @ outputs)
    # What is made good at step 5 has that step's survival: of errors that grow fourfold until there, 3 / 4 stay.
    shrinking = np.array([1, 1, 1, 4.0, 4.0, 1, 1, 1])
    left = Skips(SIGMAS, Method(1, 2), LENGTHS, shrinking, feedback=0.0).combination(mask)
    assert left @ outputs == pytest.approx(3 * plain @ outputs)


@pytest.mark.parametrize("method", methods(), ids=str)
def test_the_weights_are_what_a_loop_of_euler_steps_does(method: Method) -> None:
    """With outputs that do not depend on the latents, the first order is all there is; nothing fed back."""
    outputs = torch.randn(STEPS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forecast = Forecast(method.order, coordinate="sigma")
    for mask in every_schedule(STEPS)[::7]:
        x, history, missed = torch.zeros(5, dtype=torch.float64), [], {}
        for t, computed in enumerate(mask):
            if computed:
                now = Sample(SIGMAS[t], (outputs[t],), first=t == 0)
                told = outputs[t]
                if method.correct and missed:
                    [told] = corrected(history, now, missed, LENGTHS[t], forecast, method.correct)
                history, missed = [*history, now][-method.depth :], {}
            else:
                [told] = forecast.predict(history, SIGMAS[t])
                missed[SIGMAS[t]] = LENGTHS[t]
            x = x + LENGTHS[t] * told
        error = x - torch.as_tensor(LENGTHS) @ outputs
        row = Skips(SIGMAS, method, LENGTHS, feedback=0.0).combination(mask)
        assert torch.allclose(torch.as_tensor(row) @ outputs, error, atol=1e-9), mask


# ---- the dynamic program -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", methods(), ids=str)
def test_it_finds_what_trying_every_schedule_finds(method: Method) -> None:
    skips, [one] = Skips(SIGMAS, method, LENGTHS), random_gram()
    cheapest: dict[int, float] = {}
    for mask in every_schedule(STEPS):
        cost = sum(
            0.0 if after == nodes[-1] + 1 else float(squared(skips.row(nodes, after), one))
            for nodes, after in skips.stretches(mask)
        )
        cheapest[sum(mask)] = min(cost, cheapest.get(sum(mask), np.inf))
    found = best_schedules(skips, one)
    assert {count: best.cost for count, best in found.items()} == pytest.approx(cheapest)
    for count, best in found.items():
        told = sum(gap_costs(skips, one, nodes, STEPS)[after] for nodes, after in skips.stretches(best.mask))
        assert sum(best.mask) == count and told == pytest.approx(best.cost)


def test_gaps_can_be_kept_short() -> None:
    found = best_schedules(Skips(SIGMAS, Method(1), LENGTHS), random_gram()[0], longest=1)
    assert min(found) == 4 and all("00" not in "".join("01"[f] for f in best.mask) for best in found.values())


def test_descent_ends_where_no_swap_helps_and_beside_the_best() -> None:
    skips, grams = Skips(SIGMAS, Method(1), LENGTHS), random_gram(3)
    start = best_schedules(skips, grams.mean(axis=0))[4].mask
    found = descend(skips, grams, start)
    end = min(found, key=found.__getitem__)
    assert found[end] <= losses(skips, grams, [start])[0]
    assert found[end] <= losses(skips, grams, list(swaps(end))).min()
    every = [mask for mask in every_schedule(STEPS) if sum(mask) == 4]
    assert found[end] - losses(skips, grams, every).min() < 1.0  # dB


# ---- how much of an error is left ----------------------------------------------------------------------------------


def test_the_fit_finds_the_survival_that_made_the_errors() -> None:
    steps, sigmas = 20, tuple(np.linspace(1, 0.05, 20))
    lengths, grams = np.diff([*sigmas, 0.0]), random_gram(6, 20)
    true = Damping(tuple(np.linspace(0.8, -0.6, KNOTS)), feedback=0.2)
    rng, runs = np.random.default_rng(2), []
    for _ in range(8):
        mask = tuple(t == 0 or bool(rng.random() < 0.5) for t in range(steps))
        parts = Skips(sigmas, Method(1, 2), lengths).contributions(mask)
        row = parts.combination(true.survival(steps), true.feedback)
        runs.append(Seen(parts, 10 * np.log10(squared(row, grams)) + 3.0))
    found = fit(grams, runs)
    assert found.missed_db < 0.5 and np.std(found.gain_db) < 0.2
    shape = np.array(found.knots) - np.mean(found.knots)  # the decoder's gain takes up the height
    assert shape == pytest.approx(np.array(true.knots) - np.mean(true.knots), abs=0.35)
    assert fit(grams, []) == Damping()


def test_contributions_sum_up_to_the_combination() -> None:
    mask, survival = (True, False, True, False, False, True, True, False), np.linspace(2, 0.5, STEPS)
    for method in methods():
        skips = Skips(SIGMAS, method, LENGTHS, survival, feedback=0.4)
        row = skips.contributions(mask).combination(survival, 0.4)
        assert row == pytest.approx(skips.combination(mask))
