"""Shares by hindsight beside closed forms and a dense least-squares solution."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from diffaccel.extrapolation.forecast import Sample
from diffaccel.extrapolation.hindsight import best_shares, forecast, forecast_weights, guesses, missed, misses
from diffaccel.extrapolation.newton import newton_weights

AT = (1.0, 0.9, 0.75, 0.7)


def samples(values: list[torch.Tensor], first: bool = False) -> list[Sample]:
    return [
        Sample(at, (value,), None, first and i == 0) for i, (at, value) in enumerate(zip(AT, values, strict=False))
    ]


def noise(count: int, batch: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 3, 5, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_all_shares_are_the_polynomial(order: int) -> None:
    found = forecast_weights(samples(noise(4)), (1.0,) * order, 0.5)
    assert found == pytest.approx([0.0] * (3 - order) + newton_weights(AT[3 - order :], 0.5))


def test_no_share_is_reuse_and_half_lies_between() -> None:
    history = samples(noise(4))
    whole, none, half = (forecast(history, (share,), 0.5) for share in (1.0, 0.0, 0.5))
    torch.testing.assert_close(none, history[-1].values[0])
    torch.testing.assert_close(half, (whole + none) / 2)


def dense(history: list[Sample], truth: torch.Tensor, order: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares, relative residual of each sample) by a least-squares solver on the terms themselves."""
    rows = [forecast(history, (1.0,) * k, 0.6) for k in range(order + 1)]
    size = truth.flatten(1).norm(dim=1)[:, None, None]
    terms = torch.stack([((b - a) / size).flatten() for a, b in pairwise(rows)], 1)
    wanted = ((truth - rows[0]) / size).flatten()
    shares = torch.linalg.lstsq(terms.double(), wanted.double()[:, None]).solution[:, 0]
    rest = (wanted - terms @ shares.float()).reshape(len(truth), -1)
    return shares, rest.norm(dim=1)


@pytest.mark.parametrize("order", [1, 2])
def test_shares_are_the_least_squares_solution(order: int) -> None:
    history = samples(noise(4))
    part = forecast(history, (0.7, 0.4)[:order], 0.6)
    truth = part + 0.1 * noise(1, seed=7)[0]
    grams = misses(history, Sample(0.6, (truth,)), None).tolist()
    wanted, rest = dense(history, truth, order)
    found = best_shares(grams, order)
    assert found == pytest.approx(wanted.tolist(), rel=1e-3)
    assert missed(grams, found) == pytest.approx(float(rest.max()), rel=1e-3)
    assert missed(grams, found) < 0.7 * missed(grams, (1.0,) * order), "negative control: the whole polynomial"


def test_shares_stay_between_reuse_and_the_polynomial() -> None:
    history = samples(noise(4))
    for shares, wanted in ((-0.5,), (0.0,)), ((1.8,), (1.0,)):
        truth = forecast(history, shares, 0.6)
        assert best_shares(misses(history, Sample(0.6, (truth,)), None).tolist(), 1) == pytest.approx(wanted)


def test_misses_of_one_order() -> None:
    history, truth = samples(noise(4)), noise(1, seed=3)[0]
    size = truth.flatten(1).norm(dim=1)
    for order in range(4):
        wanted = (forecast(history, (1.0,) * order, 0.6) - truth).flatten(1).norm(dim=1) / size
        torch.testing.assert_close(misses(history, Sample(0.6, (truth,)), order).flatten().sqrt(), wanted)
        if order < 3:
            grams = misses(history, Sample(0.6, (truth,)), None).tolist()
            assert missed(grams, (1.0,) * order) == pytest.approx(float(wanted.max()), rel=1e-4)


def test_a_young_history_says_nothing_of_slopes() -> None:
    now = Sample(0.75, (noise(1, seed=5)[0],))
    for first, orders in ((True, 1), (False, 2)):
        history = samples(noise(2), first)
        found = guesses(history, now, misses(history, now, None).tolist(), None, 0.0)
        assert [len(guess.shares) for guess in found] == list(range(orders))


def test_outputs_that_are_no_numbers_open_no_gap() -> None:
    history = samples(noise(4))
    now = Sample(0.6, (torch.zeros(2, 3, 5),))
    found = guesses(history, now, misses(history, now, None).tolist(), None, 0.0)
    assert all(guess.error == math.inf for guess in found)


def test_rounding_is_not_taken_for_an_error() -> None:
    history = samples(noise(4))
    now = Sample(0.6, (forecast(history, (1.0, 1.0), 0.6),))
    grams = misses(history, now, None).tolist()
    [*_, exact] = guesses(history, now, grams, None, 0.0)
    assert exact.shares == pytest.approx((1.0, 1.0), abs=1e-3) and exact.error < 1e-3 and exact.power > 2.9
    assert guesses(history, now, grams, None, 0.5)[0].error < guesses(history, now, grams, None, 0.0)[0].error
