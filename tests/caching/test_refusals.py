"""What a newcomer tried: contradictions and wrong values are refused, and settings that reuse nothing say so."""

from __future__ import annotations

from typing import Any

import pytest

from diffaccel import accelerate, attach
from diffaccel.caching import Denoiser, Guards, RatesGate, ScheduleGate
from diffaccel.errors import InvalidOptionError
from tests import tiny
from tests.invariants.levers import pattern


@pytest.fixture(scope="module")
def pipe() -> Any:
    return attach(tiny.build("flux"))


def test_guards_are_given_once(pipe: Any) -> None:
    gate = ScheduleGate([0, 3])
    with pytest.raises(InvalidOptionError, match=r"guard was given, and warmup_steps as well"):
        pipe.enable_cache(gate=gate, guard=Guards(), scope=Denoiser(), warmup_steps=5)
    pipe.enable_cache(gate=gate, guard=Guards(), scope=Denoiser())
    [item] = pipe.acceleration.plan.items
    assert "fewer than" not in item.reason and "min_steps" not in item.params
    pipe.enable_cache(gate=gate, guard=Guards(min_steps=20), scope=Denoiser())
    assert "fewer than 20 steps" in pipe.acceleration.plan.items[0].reason


def test_a_plan_of_python_objects_is_not_written(pipe: Any) -> None:
    pipe.enable_cache(gate=ScheduleGate([0, 3]), guard=Guards(), scope=Denoiser())
    with pytest.raises(InvalidOptionError, match=r"cache\.custom is made of Python objects"):
        pipe.acceleration.plan.to_toml()


def test_a_schedule_of_another_length_names_the_cache(pipe: Any) -> None:
    pipe.enable_step_schedule(steps="101", min_steps=0)
    with pytest.raises(InvalidOptionError, match=r"cache.schedule: .*3 entries.*6 steps"):
        tiny.run(pipe, "flux", num_inference_steps=6)


NOTHING: list[dict[str, Any]] = [
    {"cache": "interval", "cache_max_consecutive": 0},
    {"cache": "interval", "cache_max_bytes": 0},
    {"cache": "interval", "cache_start": 0.5, "cache_end": 0.5},
    {"cache": "interval", "cache_warmup_steps": 50},
    {"cache": "schedule", "cache_steps": list(range(6))},
]


@pytest.mark.parametrize("options", NOTHING, ids=str)
def test_settings_that_reuse_nothing_say_so(pipe: Any, options: dict[str, Any]) -> None:
    accelerate(pipe, None, strict=True, cache_min_steps=0, cache_last_steps=0, **options)
    tiny.run(pipe, "flux", num_inference_steps=6)
    assert all(pattern(pipe))
    assert any("reused nothing" in note for note in pipe.acceleration.report.notes)
    accelerate(pipe, None, cache="interval", cache_min_steps=0)
    tiny.run(pipe, "flux", num_inference_steps=6)
    assert not any("reused nothing" in note for note in pipe.acceleration.report.notes)


BAD: list[dict[str, Any]] = [
    {"cache": "taylorseer", "cache_max_gain": "x"},
    {"cache": "taylorseer", "cache_first_enhance": -5},
    {"cache": "teacache", "cache_coefficients": ["a"]},
    {"cache": "magcache", "cache_ratios": [1.0, -1.0]},
    {"cache": "magcache", "cache_ratios": ["a"]},
    {"cache": "adacache", "cache_codebook": {"a": 2}},
    {"cache": "adacache", "cache_codebook": [0.1, 3]},
]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_wrong_values_are_refused_by_name(pipe: Any, options: dict[str, Any]) -> None:
    name = list(options)[1].removeprefix("cache_")
    with pytest.raises(InvalidOptionError, match=f"cache='{options['cache']}': .*{name}"):
        accelerate(pipe, None, **options)


@pytest.mark.parametrize("make", [lambda: RatesGate(-1), lambda: ScheduleGate(-1), lambda: ScheduleGate("x")])  # type: ignore[arg-type]
def test_gates_refuse_what_they_cannot_use(make: Any) -> None:
    with pytest.raises(InvalidOptionError):
        make()


def test_code_books_come_as_a_mapping_or_as_pairs() -> None:
    assert RatesGate({0.1: 3}).codebook == RatesGate(((0.1, 3),)).codebook == ((0.1, 3),)  # type: ignore[arg-type]
