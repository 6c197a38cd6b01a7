"""From tolerance to PSNR: the line, what it promises of new prompts, and its way through a preset's table."""

from __future__ import annotations

import math
import tomllib

import numpy as np
import pytest

from diffaccel.planner import toml
from diffaccel.tune.calibrate import TOLERANCES, Calibration
from diffaccel.tune.runs import CAP_DB, Trial


def made_up(prompts: int, seed: int = 0) -> dict[float, Trial]:
    """PSNR falls by 14 dB a decade; a prompt is off by some dB at all tolerances, and a little at each."""
    rng = np.random.default_rng(seed)
    off = rng.normal(0, 3, prompts)
    return {
        t: Trial(tuple(20 - 14 * math.log10(t) + off + rng.normal(0, 0.5, prompts)), (), 28 * t**-0.1 / 2, 1.0)
        for t in TOLERANCES
    }


def test_the_line_is_found_and_survives_the_preset() -> None:
    found = Calibration.of(made_up(60))
    assert found is not None and found.line.per_decade == pytest.approx(-14, abs=0.5)
    again = Calibration.read(tomllib.loads(toml.dumps(found.table())))
    assert again.tolerance_for(45.0) == pytest.approx(found.tolerance_for(45.0), rel=0.01)
    assert again.computed == pytest.approx(found.computed, abs=0.01)


def test_of_new_prompts_as_few_fall_below_as_promised() -> None:
    found = Calibration.of(made_up(60))
    assert found is not None
    careful, plain = found.tolerance_for(45.0, miss=0.1), found.tolerance_for(45.0, miss=None)
    assert careful < plain
    new = np.random.default_rng(5).normal(0, 3, 4000)
    assert np.mean(20 - 14 * math.log10(careful) + new < 45.0) < 0.12
    assert np.mean(20 - 14 * math.log10(plain) + new < 45.0) > 0.3  # negative control: the mean promises nothing


def test_few_prompts_promise_nothing_and_pictures_that_do_not_change_say_nothing() -> None:
    few = Calibration.of(made_up(4))
    assert few is not None and few.tolerance_for(45.0, miss=0.1) == 0.0 < few.tolerance_for(45.0, miss=None)
    same = Trial((CAP_DB,) * 4, (), 28.0, 1.0)
    assert Calibration.of({0.001: same, **{0.004: made_up(4)[0.004]}}) is None
