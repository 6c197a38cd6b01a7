"""`pipe._interrupt = True` stops diffusers' loop without an exception: the report must not call that completed."""

from __future__ import annotations

from typing import Any

import pytest

from diffaccel import accelerate
from tests import tiny


def stopping_at(step: int) -> Any:
    """A callback that stops the run when this step is over, as diffusers documents it."""

    def callback(pipe: Any, index: int, timestep: Any, kwargs: Any) -> Any:
        pipe._interrupt = index == step
        return kwargs

    return callback


@pytest.mark.parametrize("cache", [None, "first_block"])
@pytest.mark.parametrize("family", ["flux", "sd3", "wan"])
def test_a_stopped_run_is_not_completed(family: str, cache: str | None) -> None:
    pipe = accelerate(tiny.build(family), None, **({"cache": cache, "cache_min_steps": 0} if cache else {}))
    tiny.run(pipe, family, num_inference_steps=5, callback_on_step_end=stopping_at(1))
    report = pipe.acceleration.report
    assert not report.completed and "did not complete" in str(report)
    assert max(step.index for step in report.steps) == 1
    assert "stopped by pipe._interrupt after 2 of 5 steps" in report.notes
    assert report.cache_bytes_held == 0
    tiny.run(pipe, family, num_inference_steps=5)
    assert pipe.acceleration.report.completed and not any("_interrupt" in n for n in pipe.acceleration.report.notes)


def test_an_interrupt_after_the_last_step_stops_nothing() -> None:
    """The negative control: all steps were done."""
    pipe = accelerate(tiny.build("flux"), None)
    tiny.run(pipe, "flux", num_inference_steps=3, callback_on_step_end=stopping_at(2))
    assert pipe.acceleration.report.completed
