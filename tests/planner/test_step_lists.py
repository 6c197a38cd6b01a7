"""Lists of steps are checked where they are written, wherever a lever takes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diffaccel import InvalidOptionError, accelerate, attach, plan
from diffaccel.caching import Guards, ScheduleGate
from diffaccel.guidance.reuse import GuidanceReuse
from tests import tiny

PLACES: dict[str, Callable[[Any], Any]] = {
    "cache_steps": lambda given: plan(PIPE, None, cache="schedule", cache_steps=given),
    "accelerate": lambda given: accelerate(PIPE, None, cache="schedule", cache_steps=given),
    "cache_steps_mask": lambda given: plan(PIPE, None, cache="dbcache", cache_front_blocks=1, cache_steps_mask=given),
    "enable_step_schedule": lambda given: attach(PIPE).enable_step_schedule(steps=given),
    "guidance_schedule": lambda given: plan(PIPE, None, guidance="reuse", guidance_schedule=given),
    "GuidanceReuse": lambda given: GuidanceReuse(schedule=given),
    "ScheduleGate": lambda given: ScheduleGate(given),
    "Guards": lambda given: Guards(mask=given),
}
PIPE = tiny.build("flux")

WRONG: list[tuple[str, Any, str]] = [
    ("unsorted", [0, 5, 3], "3 comes after 5"),
    ("unsorted, the first one last", [4, 2, 0], "2 comes after 4"),
    ("flags or steps?", [1, 0], "0 comes after 1"),
    ("unsorted from the end", [0, -1, -3], "-3 comes after -1"),
    ("from the end first", [-1, 0, 3], "0 comes after -1"),
    ("repeated", [0, 2, 2, 4], "twice"),
    ("repeated from the end", [0, -2, -2], "twice"),
    ("a NumPy array", np.array([0, 5, 3]), "3 comes after 5"),
    ("a share", [0, 2.5], "flags or of steps"),
    ("text", [0, "2"], "flags or of steps"),
    ("flags among steps", [0, True, 3], "flags or of steps"),
    ("nothing", [], ""),
    ("other signs", "10x1", "0 and 1"),
    ("a set", {0, 1}, ""),
    ("a number", 3, ""),
    ("many", [0, *range(900, 0, -1)], "899 comes after 900"),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("kind", "given", "says"), WRONG, ids=[kind for kind, _, _ in WRONG])
def test_refused_where_it_is_set(place: str, kind: str, given: Any, says: str) -> None:
    with pytest.raises(InvalidOptionError) as error:
        PLACES[place](given)
    assert says in str(error.value) and len(str(error.value)) <= 300, str(error.value)


@pytest.mark.parametrize("place", [name for name in PLACES if name != "Guards"])
@pytest.mark.parametrize("given", [[2, 4], "0110", [False, True], [0, 0, 1, 1]], ids=str)
def test_the_first_step_must_be_computed(place: str, given: Any) -> None:
    """(Guards alone may leave the first step to the gate.)"""
    with pytest.raises(InvalidOptionError, match="step 0"):
        PLACES[place](given)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "given",
    [[0, 2, 4], (0, 1, 5), [0, 3, -2, -1], "1011 0011", [True, False, True], [1, 0, 1, 1], np.array([0, 2, 4])],
    ids=str,
)
def test_taken(place: str, given: Any) -> None:
    """The negative control: what is sound is set."""
    PLACES[place](given)
