"""The solver on pipelines: against a loop by hand, beside the step cache, refusals, iterations left over."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from diffaccel import IncompatibleError, InvalidOptionError, accelerate, attach, plan
from diffaccel.errors import UnsupportedModelError
from tests import tiny
from tests.caching.settings import latents, plain_latents
from tests.invariants.levers import counted, item

ADAPTIVE = {"solver_grid": "adaptive", "solver_tolerance": 0.2}


def solved(family: str, **more: Any) -> Any:
    """A fresh pipeline with the solver on."""
    return accelerate(tiny.build(family), None, strict=True, solver="abm", **more)


def test_it_is_the_loop_by_hand() -> None:
    """ABM of order 2 on a real pipeline, from what it gave the sampler: numpy fits and integrates the polynomials."""
    pipe, seen = solved("flux", solver_order=2, solver_corrector=True), []
    plain = type(pipe.scheduler).step

    class Spying(type(pipe.scheduler)):  # type: ignore[misc]
        def step(self, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            if sample.ndim == 3:  # not what it is tried on beforehand
                seen.append((model_output.double().numpy(), sample.double().numpy()))
            return plain(self, model_output, timestep, sample, *args, **kwargs)

    Spying.__name__ = type(pipe.scheduler).__name__
    pipe.scheduler = Spying.from_config(pipe.scheduler.config)
    result = latents(pipe, "flux").double().numpy()
    at = [float(s) for s in pipe.scheduler.sigmas]
    slopes, x = [v.reshape(-1) for v, _ in seen], seen[0][1].reshape(-1)

    def integral(nodes: list[int], start: float, end: float) -> np.ndarray:
        fitted = np.polyfit([at[n] for n in nodes], np.stack([slopes[n] for n in nodes]), len(nodes) - 1)
        powers = np.arange(len(nodes), 0, -1)
        return ((end**powers - start**powers) / powers) @ fitted

    moved = 0.0
    for i in range(len(slopes)):
        np.testing.assert_allclose(seen[i][1].reshape(-1), x, atol=1e-5)
        if i:
            x = x + integral(list(range(max(0, i - 2), i + 1)), at[i - 1], at[i]) - moved
        moved = integral(list(range(max(0, i - 1), i + 1)), at[i], at[i + 1])
        x = x + moved
    np.testing.assert_allclose(result.reshape(-1), x, atol=1e-5)
    assert np.abs(x - plain_latents("flux").double().numpy().reshape(-1)).max() > 1e-3


# ---- beside the step cache -----------------------------------------------------------------------------------------


def test_both_in_one_call_are_refused() -> None:
    pipe = tiny.build("flux")
    with pytest.raises(IncompatibleError, match=r"cache='adaptive' and solver='abm'"):
        accelerate(pipe, None, cache="adaptive", solver="abm")
    with pytest.raises(IncompatibleError):
        plan(pipe, None, cache="adaptive", solver="abm")
    assert not hasattr(pipe, "acceleration")


def test_one_takes_the_place_of_the_other() -> None:
    pipe = accelerate(tiny.build("flux"), None, cache="interval")
    pipe.enable_solver()
    assert list(pipe.acceleration.plan.enabled) == ["solver.abm"]
    assert "solver.abm took the place of cache.interval" in pipe.acceleration.plan.notes
    assert torch.equal(latents(pipe, "flux"), latents(solved("flux"), "flux"))
    pipe.enable_adaptive_cache()
    assert list(pipe.acceleration.plan.enabled) == ["cache.adaptive"]
    assert "cache.adaptive took the place of solver.abm" in pipe.acceleration.plan.notes
    pipe.disable_cache()
    assert torch.equal(latents(pipe, "flux"), plain_latents("flux"))


def test_an_override_goes_before_the_preset() -> None:
    """A preset with a cache, and a solver on top of it."""
    found = plan(tiny.build("flux"), "auto", solver="abm")
    assert "solver.abm" in found.enabled and not any(name.startswith("cache") for name in found.enabled)
    assert any("solver.abm took the place of cache." in note for note in found.notes)
    assert "solver.abm" not in plan(tiny.build("flux"), "auto").enabled


def test_a_plan_comes_back() -> None:
    pipe = solved("flux", solver_grid=[1.0, 0.6, 0.3])
    again = type(pipe.acceleration.plan).from_toml(pipe.acceleration.plan.to_toml())
    other = accelerate(tiny.build("flux"), again)
    assert torch.equal(latents(other, "flux"), latents(pipe, "flux"))


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"solver": "amb"}, "abm"),
        ({"solver": "abm", "solver_order": 4}, "order"),
        ({"solver": "abm", "solver_order": True}, "order"),
        ({"solver": "abm", "solver_corrector": "on"}, "corrector"),
        ({"solver": "abm", "solver_grid": "adaptve"}, "adaptive"),
        ({"solver": "abm", "solver_grid": [0.5, 0.7]}, "fall"),
        ({"solver": "abm", "solver_grid": [1.0]}, "fall"),
        ({"solver": "abm", "solver_grid": [1.0, -0.5]}, "fall"),
        ({"solver": "abm", "solver_tolerance": 0}, "tolerance"),
        ({"solver": "abm", "solver_tolerence": 1}, "tolerance"),
        ({"solver": "abm", "solver_tolerance": 0.2}, "sets nothing here: it is for grid='adaptive'"),
        ({"solver_order": 2}, "solver="),
    ],
)
def test_bad_input_gets_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOptionError, match=words) as caught:
        accelerate(tiny.build("flux"), None, **options)
    assert len(str(caught.value)) <= 300


def test_levels_above_all_noise_are_refused_on_flow_models() -> None:
    with pytest.raises(UnsupportedModelError, match="grid begins at 5: noise levels of a flow model are at most 1"):
        solved("flux", solver_grid=[5.0, 0.5])
    solved("sdxl", solver_grid=[5.0, 0.5])  # k-diffusion's measure has no such end


def test_a_scheduler_that_adds_noise() -> None:
    pipe = tiny.build("sdxl")
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    skipped = item(plan(pipe, None, solver="abm"), "solver")
    assert skipped.status == "skipped" and skipped.reason.startswith(
        "EulerAncestralDiscreteScheduler adds fresh noise"
    )
    with pytest.raises(UnsupportedModelError, match="EulerAncestralDiscreteScheduler"):
        attach(pipe).enable_solver()
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.enable_solver()
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    tiny.run(pipe, "sdxl")
    assert any("stood down" in note and "adds fresh noise" in note for note in pipe.acceleration.report.notes)


# ---- iterations that are left over ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["flux", "wan", "sdxl"])
def test_what_is_left_over_calls_no_model(family: str) -> None:
    pipe = solved(family, **ADAPTIVE | ({"solver_tolerance": 3.0} if family == "sdxl" else {}))
    times: list[float] = []

    def note(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        times.append(float(timestep))
        return kwargs

    first = {"flux": "x_embedder", "wan": "patch_embedding", "sdxl": "conv_in"}[family]
    with counted(getattr(tiny.denoiser(pipe), first)) as calls:
        result = latents(pipe, family, num_inference_steps=16, callback_on_step_end=note)
    stats = pipe.acceleration.report.stats["solver.abm"]
    branches = 2 if family == "wan" else 1
    assert calls[0] == branches * stats["evaluations"] and 3 <= stats["evaluations"] < 16
    assert stats["iterations"] == 16 and torch.isfinite(result).all()
    assert sum(step.computed for step in pipe.acceleration.report.steps) == calls[0]
    assert times == sorted(times, reverse=True) and len(set(times[: stats["evaluations"]])) == stats["evaluations"]


def test_shifts_give_the_same_levels() -> None:
    """The scheduler's own grid only says how many."""
    found = []
    for shift in (1.0, 3.0):
        pipe = solved("sd3", **ADAPTIVE)
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
        found.append(latents(pipe, "sd3", num_inference_steps=16))
    assert torch.equal(*found)


def test_levels_of_ones_own_are_met_as_they_are() -> None:
    mine = (1.0, 0.93, 0.81, 0.6, 0.35, 0.12)
    pipe = solved("sd3", solver_grid=(*mine, 0.0))
    latents(pipe, "sd3")
    assert [step.sigma for step in pipe.acceleration.report.steps] == pytest.approx(mine)
    latents(pipe, "sd3", num_inference_steps=9)
    assert any("6 levels were interpolated to 9 steps" in note for note in pipe.acceleration.report.notes)


# ---- what pipelines do besides -------------------------------------------------------------------------------------


def test_latents_that_a_callback_writes_are_kept() -> None:
    pipe = solved("flux")

    def zero(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"latents": kwargs["latents"] * 0} if index == 5 else kwargs

    assert latents(pipe, "flux", callback_on_step_end=zero).abs().max() == 0


@pytest.mark.parametrize("grid", [{}, ADAPTIVE])
def test_an_inpainted_picture_keeps_its_rest(grid: dict[str, Any]) -> None:
    parts = tiny.build("flux").components
    pipe = diffusers.FluxInpaintPipeline(**{k: v for k, v in parts.items() if k != "image_encoder"})
    pipe.set_progress_bar_config(disable=True)
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def painted(mask: float) -> torch.Tensor:
        call = {"image": image, "mask_image": torch.full((1, 1, 16, 16), mask), "strength": 1.0}
        call = tiny.call_kwargs("flux", height=16, width=16, num_inference_steps=8, output_type="latent") | call
        result: torch.Tensor = pipe(**call).images
        return result

    rest, whole = painted(0.0), painted(1.0)
    accelerate(pipe, None, strict=True, solver="abm", **grid)
    torch.testing.assert_close(painted(0.0), rest)
    assert not torch.equal(painted(1.0), whole)


def test_experts_begin_anew() -> None:
    """Wan 2.2: at the switch the history of the other expert is forgotten; both are called."""
    pipe = solved("wan22")
    latents(pipe, "wan22", num_inference_steps=8)
    components = [step.component for step in pipe.acceleration.report.steps]
    assert set(components) == {"transformer", "transformer_2"}
    pipe.enable_solver(order=2)
    latents(pipe, "wan22", num_inference_steps=8)
    orders = pipe.acceleration.report.stats["solver.abm"]["order"]
    assert orders == pytest.approx((2 * 8 - 2) / 8, abs=0.01)  # two steps of order 1, one for each expert


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_half_precision_is_summed_in_float32(family: str) -> None:
    pipe = tiny.build(family, dtype=torch.bfloat16)
    accelerate(pipe, None, strict=True, solver="abm")
    result = latents(pipe, family)
    assert result.dtype is torch.bfloat16 and torch.isfinite(result).all()


def test_a_stream_with_a_scheduler_of_its_own_keeps_the_levels() -> None:
    """LTX-2 steps its sound with a copy of the scheduler, which knows nothing of levels that are chosen later."""
    pipe = solved("sd3", **ADAPTIVE)
    scheduler, x = pipe.scheduler, torch.zeros(1, 4, 4, 4)
    with pipe.acceleration.run():
        scheduler.set_timesteps(12)
        copy.deepcopy(scheduler)
        before = scheduler.sigmas.clone()
        for t in scheduler.timesteps:
            x = scheduler.step(torch.cos(3 * t / 1000) + 0 * x, t, x, return_dict=False)[0]
        assert torch.equal(scheduler.sigmas, before)
    assert any("copied its scheduler" in note for note in pipe.acceleration.report.notes)


def test_a_loop_by_hand() -> None:
    """Diffusers' own building blocks in a loop of the user's."""
    pipe = solved("sd3")
    scheduler, generator = pipe.scheduler, torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 4, 4, generator=generator)
    with pipe.acceleration.run():
        scheduler.set_timesteps(12)
        start = x.double()
        for t in scheduler.timesteps:
            x = scheduler.step(torch.cos(3 * t / 1000) + 0 * x, t, x, return_dict=False)[0]
    assert (x.double() - start + float(torch.sin(torch.tensor(3.0))) / 3).abs().max() < 3e-3
