"""Intervals and bounds hold what they promise, on data whose law is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diffaccel.tune.statistics import conformal_quantile, fit_line


def test_a_new_residual_falls_below_the_conformal_quantile_as_rarely_as_promised() -> None:
    rng = np.random.default_rng(2)
    for miss, count in ((0.1, 19), (0.2, 9), (0.1, 50)):
        below = [x[0] < conformal_quantile(x[1:].tolist(), miss) for x in rng.standard_t(3, (4000, count + 1))]
        assert np.mean(below) < miss + 0.015
        assert np.mean(below) > miss - 1.5 / count - 0.015  # and it does not hide behind minus infinity


def test_too_few_residuals_promise_nothing() -> None:
    assert conformal_quantile([1.0] * 8, 0.1) == -math.inf
    assert conformal_quantile([3.0, 1.0, 2.0, *[5.0] * 6], 0.1) == 1.0


def test_a_line_in_the_logarithm_is_found_exactly_and_inverted() -> None:
    knobs, tilt = [1e-3, 4e-3, 2e-2], np.array([[-1.0], [0.0], [1.0]])
    values = 20 - 12 * np.log10(knobs)[None] + tilt
    line = fit_line(knobs, values)
    assert (line.at_one, line.per_decade) == pytest.approx((20, -12))
    assert np.array(line.residuals) == pytest.approx(np.repeat(tilt, 3, axis=1))
    assert line.value(line.knob_for(45.0)) == pytest.approx(45.0)
    assert line.bound(1e-2, miss=0.5) == pytest.approx(line.value(1e-2) + 0.0)
    assert line.bound(line.knob_for(45.0, miss=0.25), miss=0.25) == pytest.approx(45.0)
    assert line.bound(1e-2, miss=0.01) == -math.inf


def test_no_module_of_the_room_shares_a_public_name() -> None:
    """Or whoever imports the module first would find it where the function should be."""
    import diffaccel.tune.job
    from diffaccel import tune

    assert callable(tune.search) and tune.search is diffaccel.tune.job.search
