"""Budgets that a cache can keep are taken up by the adaptive one; what cannot be is said."""

from __future__ import annotations

from typing import Any

import pytest

from diffaccel import Budget, BudgetError, accelerate, plan
from tests import tiny


@pytest.fixture(scope="module")
def flux() -> Any:
    return tiny.build("flux")


def test_a_budget_of_decibels_brings_a_setting_and_not_a_plain_run(flux: Any) -> None:
    item = plan(flux, None, budget=Budget(min_psnr_db=35)).item("cache.adaptive")
    assert item.status == "enabled" and item.params["min_psnr_db"] == 35
    assert "35 dB by the testbeds' table" in item.reason


def test_other_lossy_levers_stay_off_without_a_measurement(flux: Any) -> None:
    made = plan(flux, None, budget=Budget(min_psnr_db=35), quantization="int8")
    assert made.item("cache.adaptive").status == "enabled"
    item = made.item("quantization.int8")
    assert item.status == "skipped" and "unmeasured" in item.reason
    other = plan(flux, None, budget=Budget(min_psnr_db=35), cache="first_block").item("cache.first_block")
    assert other.status == "skipped" and "35 dB" in other.reason


def test_a_tuned_preset_brings_its_calibration(flux: Any, tmp_path: Any) -> None:
    text = """
    [wishes]
    cache = "adaptive"
    [calibration]
    psnr_at_one_db = 20.0
    psnr_per_decade_db = -15.0
    lowest_residuals_db = [-3.0, -1.0, 0.5, -2.0]
    """
    path = tmp_path / "mine.toml"
    path.write_text(text)
    item = plan(flux, str(path), budget=Budget(min_psnr_db=35)).item("cache.adaptive")
    assert list(item.params["calibration"]) == [20.0, 15.0, 3.0] and "this checkpoint's calibration" in item.reason
    tolerance = 10 ** ((20 - 3 - 35) / 15)
    assert f"{tolerance:.3g}" in item.reason


def test_steps_are_counted_and_kept() -> None:
    pipe = accelerate(tiny.build("flux"), None, budget=Budget(max_steps=5))
    tiny.run(pipe, "flux", num_inference_steps=12)
    computed = {step.index for step in pipe.acceleration.report.steps if step.computed}
    assert 4 <= len(computed) <= 5


def test_what_no_cache_keeps_is_said(flux: Any) -> None:
    for wish, words in (({"cache": "first_block"}, "'first_block' is asked for"), ({"cache": None}, "switched off")):
        item = plan(flux, None, budget=Budget(max_steps=5), **wish).item("budget.max_steps")
        assert item.status == "skipped" and words in item.reason
        with pytest.raises(BudgetError, match="max_steps=5"):
            plan(flux, None, budget=Budget(max_steps=5), strict=True, **wish)
