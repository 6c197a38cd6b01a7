"""Corrections of caches with steps of their own, under samplers other than Euler's, beside a loop written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from diffaccel.core.clock import euler_lengths
from tests import tiny
from tests.caching.test_adaptive import STEPS, by_hand, scheduler_of
from tests.caching.test_steering import SCALED

COMPUTED = [0, 1, 2, 4, 7, 9, 11]
METHODS: dict[str, dict[str, Any]] = {
    "schedule": {"cache_steps": COMPUTED},
    "interval": {"cache_interval": 3, "cache_scope": "denoiser"},
    "taylorseer": {"cache_interval": 3, "cache_use_lite_mode": True},
}


def corrected(pipe: Any, method: str, correct: int) -> None:
    options = METHODS[method] | {"cache_order": 1, "cache_correct": correct, "cache_min_steps": 0}
    accelerate(pipe, None, strict=True, cache=method, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"])
def test_a_run_equals_the_loop_written_by_hand(name: str, method: str) -> None:
    pipe = tiny.build("wan")
    pipe.scheduler = scheduler_of(name, pipe)
    corrected(pipe, method, 2)
    ours = tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS)
    report = pipe.acceleration.report
    computed = sorted({step.index for step in report.steps if step.computed})
    assert 3 < len(computed) < STEPS and not [note for note in report.notes if "left out" in note]
    restore(pipe)
    by = by_hand(pipe, "wan", computed, 1, 2, axis="step")
    without = by_hand(pipe, "wan", computed, 1, 0, axis="step")
    assert (ours - by).abs().max() < 1e-4 * by.abs().max()
    assert (ours - without).abs().max() > 20 * (ours - by).abs().max(), "negative control: no correction"


def test_going_back_equals_what_is_added_under_euler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two forms of a correction are one where both hold."""
    pipe = tiny.build("wan")
    pipe.scheduler = scheduler_of("FlowMatchEulerDiscreteScheduler", pipe)
    call = {"output_type": "latent", "num_inference_steps": STEPS}
    corrected(pipe, "schedule", 2)
    added = tiny.run(pipe, "wan", **call)
    corrected(pipe, "schedule", 0)
    without = tiny.run(pipe, "wan", **call)
    for room in ("following", "scopes.denoiser"):
        monkeypatch.setattr(f"diffaccel.caching.{room}.euler_lengths", lambda *_: None)
    corrected(pipe, "schedule", 2)
    back = tiny.run(pipe, "wan", **call)
    assert euler_lengths(pipe.scheduler, [1.0, 0.0]) is not None
    assert (back - added).abs().max() < 1e-4 * added.abs().max()
    assert (back - without).abs().max() > 20 * (back - added).abs().max()


def test_what_cannot_be_followed_is_said() -> None:
    import diffusers

    pipe = tiny.build("sdxl")
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler(**SCALED)
    corrected(pipe, "schedule", 1)
    plan = str(pipe.acceleration.plan)
    tiny.run(pipe, "sdxl", output_type="latent", num_inference_steps=STEPS)
    [note] = [note for note in pipe.acceleration.report.notes if "left out its correction" in note]
    assert "EulerAncestralDiscreteScheduler" in note
    assert "no correction" in plan and "EulerAncestralDiscreteScheduler" in plan


def test_runs_are_isolated_and_undone() -> None:
    pipe = tiny.build("wan")
    plain = tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS)
    corrected(pipe, "schedule", 2)
    once = tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS)
    tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS + 2)
    assert torch.equal(tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS), once)

    def fail(pipe: Any, index: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == 5:  # between skipped steps
            raise RuntimeError("stop")
        return {}

    with pytest.raises(RuntimeError, match="stop"):
        tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS, callback_on_step_end=fail)
    assert torch.equal(tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS), once)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS), plain)
