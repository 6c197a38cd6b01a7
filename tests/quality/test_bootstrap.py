"""Intervals hold what they promise, on data whose law is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diffaccel.quality.bootstrap import bootstrap, paired


def test_the_interval_of_a_normal_mean() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    found = bootstrap(values.tolist())
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)
    assert found.excludes_zero and not bootstrap([-1.0, 1.0] * 8).excludes_zero
    assert bootstrap(values.tolist()) == found  # one seed, one answer
    alone = bootstrap([5.0])
    assert not alone.excludes_zero and alone.to_list() == []  # one prompt says nothing of others


def test_pairs_take_out_what_prompts_have_in_common() -> None:
    rng = np.random.default_rng(1)
    hard = rng.normal(50, 8, 32)  # prompts differ by far more than the two settings do
    ours, theirs = hard + 0.5 + rng.normal(0, 0.3, 32), hard
    assert paired(ours.tolist(), theirs.tolist()).excludes_zero
    assert not bootstrap((ours - rng.permutation(theirs)).tolist()).excludes_zero


def _covered(level: float, prompts: int, times: int, draw) -> int:
    """How many of so many intervals hold the true mean 0."""
    found = [bootstrap(draw(prompts).tolist(), level, draws=300, seed=i) for i in range(times)]
    return sum(interval.low <= 0 <= interval.high for interval in found)


@pytest.mark.parametrize("prompts", [6, 24])
@pytest.mark.parametrize("law", ["normal", "uniform", "t"])
def test_ninety_percent_intervals_cover_in_85_to_95_of_100_resamplings(law: str, prompts: int) -> None:
    rng = np.random.default_rng(prompts)
    laws = {"normal": rng.normal, "uniform": lambda size: rng.uniform(-1, 1, size), "t": None}
    draw = laws[law] or (lambda size: rng.standard_t(5, size))
    assert 85 <= _covered(0.9, prompts, 400, lambda n: draw(size=n)) / 4 <= 95


def test_plain_percentiles_would_not_cover_for_few_prompts() -> None:
    """The control: without Hesterberg's correction ten prompts' intervals are too short."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        data = rng.normal(size=6)
        means = rng.choice(data, (500, 6)).mean(axis=1)
        low, high = np.quantile(means, [0.05, 0.95])
        held += low <= 0 <= high
    assert held / 4 < 85


def test_the_width_is_student_s() -> None:
    """For a normal bootstrap law the reach is t s / sqrt(n); scipy is the reference."""
    from scipy.stats import t

    from diffaccel.quality.bootstrap import _student

    for freedom in (4, 9, 31):
        for tail in (0.05, 0.025):
            assert _student(tail, freedom) == pytest.approx(t.ppf(tail, freedom), rel=0.02)


def test_a_median_is_not_moved_by_one_round_that_the_machine_disturbed() -> None:
    ratios = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 9.0]
    assert bootstrap(ratios, statistic=np.median).mean == pytest.approx(1.0)
    assert bootstrap(ratios).mean > 1.9
