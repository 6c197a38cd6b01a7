"""The core invariants over the solver's grids: pictures, video, two experts, a late start, an epsilon model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from tests import fingerprint, tiny
from tests.caching.settings import latents, plain_latents

from .levers import Stop, at_step, raise_at, second_prompt, second_size, trace

GRIDS: dict[str, dict[str, Any]] = {
    "scheduler": {},
    "adaptive": {"solver_grid": "adaptive", "solver_tolerance": 0.3},
    "levels": {"solver_grid": (1.0, 0.9, 0.7, 0.5, 0.3, 0.15)},
}
FAMILIES = ("flux", "wan", "wan22", "sdxl", "flux_img2img")
CASES = [
    (family, grid) for family in FAMILIES for grid in GRIDS if not (grid == "levels" and family in ("sdxl", "wan22"))
]
every = pytest.mark.parametrize(("family", "grid"), CASES)
_memo: dict[tuple[str, ...], Any] = {}


def solved(family: str, grid: str, **more: Any) -> Any:
    """A fresh pipeline with the solver on."""
    return accelerate(tiny.build(family), None, strict=True, solver="abm", **GRIDS[grid] | more)


def fresh(family: str, grid: str, **call: Any) -> tuple[torch.Tensor, list[Any]]:
    """Latents and step records of the first run of a fresh pipeline."""
    key = (family, grid, str(sorted(call.items())))
    if key not in _memo:
        pipe = solved(family, grid)
        _memo[key] = latents(pipe, family, **call), trace(pipe)
    return _memo[key][0].clone(), _memo[key][1]


def assert_fresh(pipe: Any, family: str, grid: str, **call: Any) -> None:
    """The next run is that of a fresh pipeline."""
    result, records = latents(pipe, family, **call), fresh(family, grid, **call)
    assert torch.equal(result, records[0]) and trace(pipe) == records[1], f"{family} {grid} {call}"


@every
def test_it_acts_and_goes_without_a_trace(family: str, grid: str) -> None:
    """Invariants 1 and 3: another picture; after runs, an exception and an interrupt all is as before, bit by bit."""
    pipe = tiny.build(family)
    plain = latents(pipe, family)
    before, config = fingerprint.snapshot_pipe(pipe), dict(pipe.scheduler.config)
    accelerate(pipe, None, strict=True, solver="abm", **GRIDS[grid])
    result = latents(pipe, family)
    assert torch.isfinite(result).all() and not torch.equal(result, plain)
    assert type(pipe.scheduler).__name__ in pipe.acceleration.plan.items[0].reason
    for error in (Stop("stop"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            latents(pipe, family, callback_on_step_end=raise_at(1, error))
        assert_fresh(pipe, family, grid)
    restore(pipe)
    latents(pipe, family)  # the scheduler's arrays are those of its last loop
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert dict(pipe.scheduler.config) == config
    assert torch.equal(latents(pipe, family), plain)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_neutral(family: str) -> None:
    """Invariant 2: of order 1 without corrector it is Euler's method, bit-equal to the scheduler's."""
    pipe = solved(family, "scheduler", solver_order=1, solver_corrector=False)
    assert torch.equal(latents(pipe, family), plain_latents(family))


@pytest.mark.parametrize(("family", "grid"), [("flux", "scheduler"), ("wan", "adaptive"), ("sdxl", "adaptive")])
def test_isolation(family: str, grid: str) -> None:
    """Invariant 3: another size, number of steps, batch, prompt: the next run is a fresh one's."""
    pipe = solved(family, grid)
    for call in ({}, second_size(family), {"num_inference_steps": 9}, {"prompt": [*tiny.PROMPTS[:2]]}, {}):
        assert_fresh(pipe, family, grid, **call)
    assert pipe.acceleration.report.cache_bytes_held == 0 and pipe.acceleration.report.cache_bytes_peak > 0


@every
def test_snapshot_and_resume(family: str, grid: str) -> None:
    """Invariant 5: given up at a step boundary, another run, resumed: each is bit-equal to a run by itself."""
    pipe, states = solved(family, grid), []

    def pause(given: Any) -> None:
        if not states:
            states.append(pipe.acceleration.snapshot())
            raise Stop("preempted")

    with pytest.raises(Stop):
        latents(pipe, family, callback_on_step_end=at_step(1, pause))
    assert_fresh(pipe, family, grid, **second_prompt(num_inference_steps=7))
    result = tiny.output(pipe.acceleration.resume(states[0]))
    assert torch.equal(result, fresh(family, grid)[0]) and trace(pipe) == fresh(family, grid)[1]


@pytest.mark.parametrize("grid", ["scheduler", "adaptive"])
def test_a_nested_run(grid: str) -> None:
    """Invariants 3 and 5: another whole run inside a callback, then on: both are those of alone."""
    pipe, nested = solved("flux", grid), []
    other = second_prompt(num_inference_steps=7)

    def inside(given: Any) -> None:
        state = pipe.acceleration.snapshot()
        nested.append(latents(pipe, "flux", **other))
        pipe.acceleration.resume(state)

    result = latents(pipe, "flux", callback_on_step_end=at_step(2, inside))
    assert torch.equal(nested[0], fresh("flux", grid, **other)[0])
    assert torch.equal(result, fresh("flux", grid)[0])


@pytest.mark.parametrize("grid", ["scheduler", "adaptive"])
def test_two_pipelines_and_a_deep_copy(grid: str) -> None:
    """Invariant 3: none sees the other, and the copy has the solver as well."""
    import copy

    pipe = solved("flux", grid)
    other = copy.deepcopy(pipe)
    restore(pipe)
    assert torch.equal(latents(pipe, "flux"), plain_latents("flux"))
    assert_fresh(other, "flux", grid)
