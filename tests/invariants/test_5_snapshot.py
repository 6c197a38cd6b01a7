"""Invariant 5: a run paused at a step boundary, another run, then resumed: bit-equal to undisturbed runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from tests import tiny

from .levers import Stop, accelerated, fresh, fresh_run, put_on, second_prompt, second_size, trace

CALLS: dict[str, dict[str, Any]] = {"flux": {"true_cfg": True}}
CASES = [
    ("flux", "cache", False),
    ("flux", "cache", True),
    ("flux", "both", True),
    ("flux", "attach", True),
    ("wan", "cache", False),
    ("wan", "both", True),
    ("sd3", "cache", True),
    ("sdxl", "attach", True),
    ("sd3", "solver", True),
]


@pytest.mark.parametrize(("family", "lever", "other_size"), CASES)
def test_nested_run_and_resume(family: str, lever: str, other_size: bool) -> None:
    """Snapshot at step 2, another whole run inside the callback, resume: both pictures are those of alone."""
    call = CALLS.get(family, {})
    other = second_prompt(num_inference_steps=7, **(second_size(family) if other_size else {}))
    pipe = accelerated(family, lever)
    nested: list[torch.Tensor] = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            state = pipe.acceleration.snapshot()
            nested.append(tiny.run(pipe, family, **other))
            pipe.acceleration.resume(state)
        return kwargs

    result = tiny.run(pipe, family, callback_on_step_end=callback, **call)
    assert torch.equal(nested[0], fresh(family, lever, **other)), "the nested run was disturbed"
    reference, records = fresh_run(family, lever, **call)
    assert torch.equal(result, reference), "the paused run was disturbed"
    assert trace(pipe) == records


@pytest.mark.parametrize(
    ("family", "at"),
    [
        ("flux", 0),
        ("flux", 2),
        ("flux", tiny.STEPS - 1),
        ("wan", 0),
        ("wan", 3),
        ("sd3", 2),
        ("sdxl", 2),
        ("wan22", 1),
        ("wan22", 3),
        ("flux_img2img", 1),
    ],
)
def test_resume_a_run_that_was_given_up(family: str, at: int) -> None:
    """Snapshot, raise, another run, resume: the call's own result comes back, as if nothing had happened."""
    call = CALLS.get(family, {})
    pipe = accelerated(family, "cache")
    states: list[Any] = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == at and not states:
            states.append(pipe.acceleration.snapshot())
            raise Stop("preempted")
        return kwargs

    with pytest.raises(Stop):
        tiny.run(pipe, family, callback_on_step_end=callback, **call)
    assert torch.equal(tiny.run(pipe, family, **second_prompt()), fresh(family, "cache", **second_prompt()))
    result = tiny.output(pipe.acceleration.resume(states[0]))
    reference, records = fresh_run(family, "cache", **call)
    assert torch.equal(result, reference)
    assert trace(pipe) == records
    assert torch.equal(tiny.run(pipe, family), fresh(family)), "the run after the resumed one"


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_two_preempted_runs_resumed_in_the_other_order(family: str) -> None:
    """Two runs given up at different steps, resumed first in, last out."""
    pipe = accelerated(family, "cache")
    calls = [{}, second_prompt(num_inference_steps=8)]
    states: list[Any] = []
    for at, call in zip((2, 4), calls, strict=True):

        def callback(
            given: Any,
            index: int,
            timestep: Any,
            kwargs: dict[str, Any],
            at: int = at,
            number: int = len(states),
        ) -> dict[str, Any]:
            if index == at and len(states) == number:
                states.append(pipe.acceleration.snapshot())
                raise Stop("preempted")
            return kwargs

        with pytest.raises(Stop):
            tiny.run(pipe, family, callback_on_step_end=callback, **call)
    for state, call in zip(states, calls, strict=True):
        result = tiny.output(pipe.acceleration.resume(state))
        assert torch.equal(result, fresh(family, "cache", **call))


@pytest.mark.parametrize("seeded", [True, False], ids=["generator", "global state"])
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_schedulers_that_draw_noise(family: str, seeded: bool) -> None:
    """The noise a scheduler draws, from the call's generator or the global one, is part of the run."""

    def built() -> Any:
        pipe = tiny.build(family)
        if family == "sdxl":
            pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
        else:
            pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
        return put_on(pipe, family, "cache")

    call = {} if seeded else {"generator": None}
    states: list[Any] = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 2 and not states:
            states.append(pipe.acceleration.snapshot())
            raise Stop("preempted")
        return kwargs

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(21)
        reference = tiny.run(built(), family, **call)
        pipe = built()
        torch.manual_seed(21)
        with pytest.raises(Stop):
            tiny.run(pipe, family, callback_on_step_end=callback, **call)
        tiny.run(pipe, family, **second_prompt(generator=None))
        assert torch.equal(tiny.output(pipe.acceleration.resume(states[0])), reference)


def test_return_dict_and_callback_of_a_resumed_run() -> None:
    """A resumed run returns the form the call asked for and goes on calling its callback, each step once."""
    pipe = accelerated("flux", "cache")
    seen: list[int] = []
    states: list[Any] = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append(index)
        if index == 2 and not states:
            states.append(pipe.acceleration.snapshot())
            raise Stop("preempted")
        return kwargs

    with pytest.raises(Stop):
        pipe(**tiny.call_kwargs("flux", callback_on_step_end=callback, return_dict=False))
    result = pipe.acceleration.resume(states[0])
    assert isinstance(result, tuple) and torch.equal(result[0], fresh("flux"))
    assert seen[:3] == [0, 1, 2] and seen[-3:] == [3, 4, 5]


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("levers", ["cache", "guidance", "window"])
def test_the_peak_of_a_resumed_run_is_that_of_the_whole(levers: str, at: int) -> None:
    """What was held before the pause counts, also where less is held behind it (a window that has ended)."""
    window = {"cache_start": 0.3, "cache_end": 0.6} if levers == "window" else {}
    pipe = accelerated("sd3", "guidance" if levers == "guidance" else "cache", **window)
    states: list[Any] = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == at and not states:
            states.append(pipe.acceleration.snapshot())
            raise Stop
        return kwargs

    tiny.run(pipe, "sd3", num_inference_steps=8)
    whole = pipe.acceleration.report.cache_bytes_peak
    with pytest.raises(Stop):
        tiny.run(pipe, "sd3", num_inference_steps=8, callback_on_step_end=callback)
    pipe.acceleration.resume(states[0])
    assert pipe.acceleration.report.cache_bytes_peak == whole > 0
