"""A plan for another machine that is put into effect here: one line of warning; a plan alone says nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from diffaccel import accelerate, plan, restore
from diffaccel.ledger.hardware import HARDWARE, Hardware
from diffaccel.planner.presets.fitting import elsewhere
from tests import tiny


def warned(call: Any, *args: Any, **kwargs: Any) -> list[warnings.WarningMessage]:
    """The warnings of a call that speak of hardware."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(*args, **kwargs)
    return [warning for warning in seen if "hardware" in str(warning.message)]


@pytest.mark.parametrize("hardware", ["4090", "h100", "RTX 4090", HARDWARE["a100"], Hardware("Apple GPU", "mps", 48)])
def test_accelerate_warns_and_plan_does_not(hardware: Any) -> None:
    pipe = tiny.build("flux")
    assert warned(plan, pipe, None, hardware=hardware, cache="first_block") == []
    [warning] = warned(accelerate, pipe, None, hardware=hardware, cache="first_block")
    said = str(warning.message)
    assert (issubclass(warning.category, UserWarning) and warning.filename == warnings.__file__) or said
    assert "this is cpu" in said and "\n" not in said and len(said) <= 300
    assert warned(pipe.enable_first_block_cache, threshold=0.2) == [], "once, not at every verb"
    restore(pipe)


def test_the_warning_points_at_the_users_line() -> None:
    [warning] = warned(lambda: accelerate(tiny.build("flux"), None, hardware="4090"))
    assert warning.filename == __file__


@pytest.mark.parametrize("hardware", [None, "cpu", "CPU", HARDWARE["cpu"]])
def test_silent_on_this_machine(hardware: Any) -> None:
    assert warned(accelerate, tiny.build("flux"), None, hardware=hardware) == []


@pytest.mark.parametrize(
    ("planned", "here", "same"),
    [
        ("4090", Hardware("NVIDIA GeForce RTX 4090", "cuda", 23.6, (8, 9)), True),
        ("4090", Hardware("NVIDIA GeForce RTX 4090 Laptop GPU", "cuda", 15.6, (8, 9)), False),
        ("h100", Hardware("NVIDIA H100 80GB HBM3", "cuda", 79.1, (9, 0)), True),
        ("l40s", Hardware("NVIDIA GeForce RTX 4090", "cuda", 23.6, (8, 9)), False),
        ("cpu", Hardware("NVIDIA GeForce RTX 4090", "cuda", 23.6, (8, 9)), False),
        ("h100", Hardware("AMD Instinct MI300X", "rocm", 192.0), False),
    ],
)
def test_which_machine_is_another(planned: str, here: Hardware, same: bool) -> None:
    assert (elsewhere(HARDWARE[planned], here) is None) is same
