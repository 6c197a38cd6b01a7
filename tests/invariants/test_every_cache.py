"""The core invariants over every step cache, on pictures and on video."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from tests import fingerprint, tiny
from tests.caching.settings import (
    METHODS,
    NEUTRAL,
    NO_GUARDS,
    assert_fresh,
    cached,
    first_latents,
    latents,
    neutral,
    options,
    plain_latents,
    strip,
    tensors_in,
)

from .levers import Stop, raise_at, second_prompt, second_size

FAMILIES = ("flux", "wan")
every = pytest.mark.parametrize("method", METHODS)
both = pytest.mark.parametrize("family", FAMILIES)


@both
@every
def test_it_acts(family: str, method: str) -> None:
    """What the other tests compare is about something: some steps are reused, some are not, and the bits differ."""
    result, found = first_latents(family, method)
    assert all(set(line) == {"C", "."} and line[0] == "C" for line in found.values()), found
    assert torch.isfinite(result).all() and not torch.equal(result, plain_latents(family))


@both
@every
def test_undo(family: str, method: str) -> None:
    """Invariant 1: fingerprint (vars, registries, classes, state_dict order) and bits are as before."""
    pipe = tiny.build(family)
    latents(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, preset=None, **options(family, method))
    latents(pipe, family)
    with pytest.raises(Stop):
        latents(pipe, family, callback_on_step_end=raise_at(2, Stop("stop")))
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(latents(pipe, family), plain_latents(family))


@both
@pytest.mark.parametrize("method", NEUTRAL)
def test_neutral(family: str, method: str) -> None:
    """Invariant 2: threshold 0, interval 1 or a schedule of all steps is bit-equal, run after run."""
    pipe = accelerate(tiny.build(family), preset=None, **neutral(family, method))
    for _ in range(2):
        assert torch.equal(latents(pipe, family), plain_latents(family))
        assert pipe.acceleration.report.hit_rate == 0


@both
@every
def test_isolation(family: str, method: str) -> None:
    """Invariant 3: after an exception, another size, number of steps, batch and guidance, a run is a fresh one's."""
    pipe = cached(family, method)
    guidance: dict[str, Any] = {"true_cfg": True} if family == "flux" else {"guidance_scale": 1.0}
    assert_fresh(pipe, family, method)
    with pytest.raises(Stop):
        latents(pipe, family, callback_on_step_end=raise_at(3, Stop("stop")), **second_prompt())
    assert pipe.acceleration.report.cache_bytes_held == 0
    for call in (
        {},
        second_size(family),
        {"num_inference_steps": 8},
        {"prompt": [*tiny.PROMPTS[:2]]},
        guidance,
        {},
    ):
        assert_fresh(pipe, family, method, **call)


@both
@every
def test_second_pipeline(family: str, method: str) -> None:
    """Invariant 3: of two accelerated pipelines of one class, one restored, the other goes on; none sees the other."""
    first, second = cached(family, method), cached(family, method)
    assert_fresh(first, family, method)
    restore(first)
    assert torch.equal(latents(first, family), plain_latents(family))
    assert_fresh(second, family, method)
    assert type(first) is not type(second) and type(first).__name__ == type(second).__name__


@both
@every
def test_snapshot_and_resume(family: str, method: str) -> None:
    """Invariant 5: given up at a step boundary, another run, resumed: each is bit-equal to a run by itself."""
    pipe = cached(family, method)
    states: list[Any] = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 3 and not states:
            states.append(pipe.acceleration.snapshot())
            raise Stop("preempted")
        return kwargs

    with pytest.raises(Stop):
        latents(pipe, family, callback_on_step_end=callback)
    other = second_prompt(num_inference_steps=7)
    assert_fresh(pipe, family, method, **other)
    result = tiny.output(pipe.acceleration.resume(states[0]))
    reference, found = first_latents(family, method)
    assert strip(pipe) == found and torch.equal(result, reference)
    assert_fresh(pipe, family, method, **other)


@every
def test_a_run_inside_a_run(method: str) -> None:
    """Invariant 5: a whole run inside a step callback of another one disturbs neither."""
    pipe = cached("flux", method)
    inside: list[torch.Tensor] = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            inside.append(latents(pipe, "flux", **second_prompt()))
        return kwargs

    outside = latents(pipe, "flux", callback_on_step_end=callback)
    assert torch.equal(outside, first_latents("flux", method)[0])
    assert torch.equal(inside[0], first_latents("flux", method, **second_prompt())[0])


@both
@every
def test_few_steps(family: str, method: str) -> None:
    """Invariant 6: with the guards at their defaults a short run is computed in full, bit-equal, and says why."""
    changes = dict.fromkeys(NO_GUARDS)
    kept = {key: value for key, value in options(family, method).items() if key not in changes}
    pipe = accelerate(tiny.build(family), preset=None, **kept)
    assert torch.equal(latents(pipe, family), plain_latents(family))
    [enabled] = [entry for entry in pipe.acceleration.plan.items if entry.status == "enabled"]
    assert "min_steps=9" in enabled.reason


@both
@every
def test_no_byte_is_held_after_a_run(family: str, method: str) -> None:
    """Invariant 10: cached tensors die with the run; during it the report knows how many bytes were held."""
    pipe = cached(family, method)
    alive: list[weakref.ref[torch.Tensor]] = []

    def note(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        run = pipe.acceleration.run_in_progress()
        for states in run.state.values():
            for branch in states.values():
                held = tensors_in(getattr(branch, "memory", branch))
                alive.extend(weakref.ref(tensor) for tensor in held if tensor.ndim)  # timesteps are the scheduler's
        return kwargs

    latents(pipe, family, callback_on_step_end=note)
    assert alive and not [ref for ref in alive if ref() is not None], "without any garbage collection"
    assert pipe.acceleration.report.cache_bytes_held == 0 < pipe.acceleration.report.cache_bytes_peak
