"""Static schedules: what users may write, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from diffaccel.caching.gates.schedule import ScheduleGate
from diffaccel.caching.step import Ruling, Step
from diffaccel.caching.tables import load_table, steps_mask
from diffaccel.errors import InvalidOptionError
from diffaccel.extrapolation import schedule
from diffaccel.extrapolation.schedule import computed_steps, parse_schedule

WANT = (True, False, True, True, False)


@pytest.mark.parametrize(
    "value",
    [
        "10110",
        "1 0110",
        "10_110",
        [1, 0, 1, 1, 0],
        [True, False, True, True, False],
        [0, 2, 3],
        (3, 0, 2),
        [0, -3, -2],
    ],
)
def test_all_forms(value: Any) -> None:
    assert parse_schedule(value, 5) == WANT


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1011", "4 entries, and the loop has 5 steps"),
        ("101101", "6 entries"),
        ("0011", "4 entries"),
        ("00110", "nothing is stored yet"),
        ([1, 3], "nothing is stored yet"),
        ([0, 5], "names step 5"),
        ([0, 2, 2], "twice"),
        ("1x110", "only 0 and 1"),
        ("", "only 0 and 1"),
        ([0.5, 1], "list of flags or of steps"),
    ],
)
def test_refusals(value: Any, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        parse_schedule(value, 5)


def test_schedules_for_other_numbers() -> None:
    assert computed_steps(schedule.uniform(7, 3)) == [0, 3, 6]
    assert computed_steps(schedule.uniform(7, 3, first=2)) == [0, 1, 2, 5]
    assert computed_steps(schedule.fora(8, 3)) == [0, 3, 6, 7]
    assert computed_steps(schedule.taylorseer(8, 3, first=0)) == [0, 3, 6]
    assert computed_steps(schedule.fora(5, 1)) == [0, 1, 2, 3, 4]
    assert schedule.delta_dit(6, 2, 3) == ["full", "rear", "full", "front", "full", "front"]
    with pytest.raises(InvalidOptionError, match="interval"):
        schedule.fora(8, 0)
    with pytest.raises(InvalidOptionError, match="steps"):
        schedule.fora(0, 2)


def test_the_gate_follows_guards_first() -> None:
    gate = ScheduleGate(lambda total: schedule.fora(total, 2)).fit(6)
    state = gate.start()
    assert [gate.decide(state, None, Step(t, 6))[0] for t in range(6)] == [False, True, False, True, False, False]
    assert gate.decide(state, None, Step(1, 6), Ruling.COMPUTE)[0] is False
    assert gate.decide(state, None, Step(2, 6), Ruling.REUSE)[0] is True
    with pytest.raises(InvalidOptionError, match="loop has 7 steps"):
        ScheduleGate("101010").fit(7)
    with pytest.raises(InvalidOptionError, match="number of steps"):
        ScheduleGate("101010").fit(None)


@pytest.mark.parametrize("total", sorted(load_table("steps_masks")["masks"], key=int))
def test_every_published_mask_fits_its_length(total: str) -> None:
    for preset in load_table("steps_masks")["masks"][total]:
        assert len(steps_mask(preset, int(total))) == int(total)


def test_masks_by_name() -> None:
    assert computed_steps(steps_mask("ultra", 16)) == [0, 1, 15], "the run of 13 that upstream generates"
    with pytest.raises(InvalidOptionError, match="no published steps mask for 27 steps"):
        steps_mask("fast", 27)
    with pytest.raises(InvalidOptionError, match="did you mean 'medium'"):
        steps_mask("medum", 28)
