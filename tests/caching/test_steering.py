"""Step control beside what pipelines do with their samplers: batches, experts, late starts, edits, schedulers."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffaccel import accelerate
from diffaccel.caching.levels import levels_of, why_not
from diffaccel.caching.replay import Skipped, Trail
from diffaccel.core.clock import schedule_of
from tests import tiny
from tests.caching.settings import strip
from tests.caching.test_grouped import noise
from tests.models.families import table

ON = {"cache": "adaptive", "cache_min_steps": 0, "cache_max_gap": 4}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def adaptive(pipe: Any, tolerance: float = 1e9, **more: Any) -> Any:
    """A pipeline whose gaps are as long as they may get, unless told."""
    return accelerate(pipe, None, strict=True, **ON | {"cache_tolerance": tolerance} | more)


# ---- schedulers ----------------------------------------------------------------------------------------------------


def reason(scheduler: Any, steps: int = 10) -> str | None:
    """Why step control would not follow it."""
    scheduler.set_timesteps(steps)
    total = len(scheduler.timesteps)
    run: Any = SimpleNamespace(scheduler=scheduler, total=total, schedule=lambda: schedule_of(scheduler))
    return why_not(run)


FOLLOWED: dict[str, dict[str, Any]] = {
    "EulerDiscreteScheduler": SCALED,
    "DDIMScheduler": SCALED,
    "UniPCMultistepScheduler": FLOW,
    "DPMSolverMultistepScheduler": {"prediction_type": "v_prediction"},
    "DEISMultistepScheduler": SCALED,
    "LMSDiscreteScheduler": SCALED,
    "CogVideoXDDIMScheduler": {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    "FlowMatchEulerDiscreteScheduler": {"shift": 3.0},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "EulerAncestralDiscreteScheduler": (SCALED, "fresh noise"),
    "LCMScheduler": (SCALED, "fresh noise"),
    "TCDScheduler": (SCALED, "fresh noise"),
    "DDPMScheduler": (SCALED, "fresh noise"),
    "SASolverScheduler": (SCALED, "fresh noise"),
    "DPMSolverMultistepScheduler": ({"algorithm_type": "sde-dpmsolver++"}, "fresh noise"),
    "FlowMatchEulerDiscreteScheduler": ({"stochastic_sampling": True}, "fresh noise"),
    "PNDMScheduler": ({"skip_prk_steps": True}, "noise level more than once"),
    "CogVideoXDPMScheduler": ({}, "other arguments"),
    "DDIMScheduler": ({"prediction_type": "sample"}, "prediction_type='sample'"),
    "IPNDMScheduler": ({}, "no noise levels"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_schedulers_that_are_followed(name: str) -> None:
    scheduler = getattr(diffusers, name)(**FOLLOWED[name])
    state = torch.get_rng_state()
    assert reason(scheduler) is None
    assert torch.equal(torch.get_rng_state(), state), "the trial leaves no trace"
    timesteps, sigmas = schedule_of(scheduler)
    levels = levels_of(scheduler, timesteps, sigmas)
    assert levels is not None and all(0 < value < 1e4 for value in levels.at) and all(c > 0 for c in levels.cost)


@pytest.mark.parametrize("name", REFUSED)
def test_schedulers_that_are_refused_by_name(name: str) -> None:
    config, why = REFUSED[name]
    text = reason(getattr(diffusers, name)(**config))
    assert text is not None and text.startswith(name) and why in text


def test_noise_that_the_pipeline_asks_for() -> None:
    """Bit-equal to plain, and said."""
    pipe = tiny.build("sdxl")
    pipe.scheduler = diffusers.DDIMScheduler(**SCALED)
    call = {"output_type": "latent", "num_inference_steps": 4, "eta": 1.0}
    plain = tiny.run(pipe, "sdxl", **call)
    adaptive(pipe)
    assert torch.equal(tiny.run(pipe, "sdxl", **call), plain)
    [note] = [note for note in pipe.acceleration.report.notes if note.startswith("cache.adaptive stood down")]
    assert "eta" in note


def test_noise_levels_of_ddim() -> None:
    """k-diffusion's sigma, by hand: sqrt((1 - a) / a)."""
    scheduler = diffusers.DDIMScheduler(**SCALED)
    scheduler.set_timesteps(5)
    levels = levels_of(scheduler, *schedule_of(scheduler))
    alphas = scheduler.alphas_cumprod[scheduler.timesteps].double()
    assert levels is not None and levels.at == pytest.approx(((1 - alphas) / alphas).sqrt().tolist())


# ---- batches -------------------------------------------------------------------------------------------------------

SLOW = pytest.param("wan", "DPMSolverMultistepScheduler", marks=pytest.mark.slow)
TOLERANCES = (0.008, 0.05, 0.02, 0.1, 0.2, 0.006, 0.03, 0.015, 0.04, 0.07, 0.01, 0.12)


def batch(pipe: Any, family: str, samples: slice, steps: int = 14) -> tuple[torch.Tensor, set[str]]:
    """Latents of a calm and a restless picture, or of one of them, and the strips."""
    prompts = list(tiny.PROMPTS[:2])[samples]
    more = {"negative_prompt": ["blurry"] * len(prompts)} if family != "flux" else {}
    call = {"prompt": prompts, "latents": noise(family)[samples], "num_inference_steps": steps}
    latents = tiny.run(pipe, family, output_type="latent", **call, **more)
    return latents, set(strip(pipe).values())


@pytest.mark.parametrize(("family", "scheduler"), [("flux", None), ("sd3", None), ("wan", None), SLOW])
def test_each_sample_gets_the_picture_of_its_single_run(family: str, scheduler: str | None) -> None:
    pipe = tiny.build(family)
    if scheduler is not None:
        pipe.scheduler = getattr(diffusers, scheduler)(**FLOW)

    def alone(tolerance: float) -> list[tuple[torch.Tensor, set[str]]]:
        adaptive(pipe, tolerance)
        return [batch(pipe, family, slice(i, i + 1)) for i in range(2)]

    tries = ((tolerance, alone(tolerance)) for tolerance in TOLERANCES)
    tolerance, singles = next((t, found) for t, found in tries if found[0][1] != found[1][1])  # or nothing is tested
    adaptive(pipe, tolerance, cache_per_sample=True)
    found, marks = batch(pipe, family, slice(0, 2))

    def equal(found: torch.Tensor, i: int) -> bool:
        alone = singles[i][0]
        return torch.allclose(found[i : i + 1], alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))

    assert equal(found, 0) and equal(found, 1)
    [one], [two] = (single[1] for single in singles)
    assert marks == {"".join("C" if "C" in pair else "." for pair in zip(one, two, strict=True))}
    adaptive(pipe, tolerance)
    joint, shared = batch(pipe, family, slice(0, 2))
    assert not (equal(joint, 0) and equal(joint, 1)), "negative control: one decision for both"
    assert len(shared) == 1, "and the branches share it"


# ---- latents that others change ------------------------------------------------------------------------------------


def trail(output: torch.Tensor) -> Trail:
    """One step was skipped and gave `output`."""
    return Trail({}, (Skipped(3, ((output, 0, output), {})),)).returned(output)


def test_edits_of_latents_are_seen() -> None:
    output = torch.zeros(1, 4)
    assert trail(output).seen(output).steps[0].edit is None
    edit = trail(output).seen(output + 2).steps[0].edit
    assert edit is not None and torch.equal(edit, torch.full((1, 4), 2.0))
    written = trail(output)
    output += 1
    assert written.seen(output).lost, "written into"
    assert written.seen(output + 1).lost, "written into, and then copied"
    assert trail(output).seen(torch.zeros(2, 4)).lost, "of another shape"
    with torch.inference_mode():  # where nobody counts writes
        output = torch.zeros(1, 4)
        written = trail(output)
        output += 1
        edit = written.seen(output).steps[0].edit
    assert edit is not None and torch.equal(edit, torch.ones(1, 4))


# ---- what begins anew ----------------------------------------------------------------------------------------------


def by_component(pipe: Any) -> dict[str, str]:
    """Strips of each denoiser's conditional calls."""
    steps = [step for step in pipe.acceleration.report.steps if step.branch != "uncond"]
    names = dict.fromkeys(step.component for step in steps)
    return {name: "".join(".C"[s.computed] for s in steps if s.component == name) for name in names}


def test_an_expert_begins_anew() -> None:
    pipe = adaptive(tiny.build("wan22"))
    tiny.run(pipe, "wan22", output_type="latent", num_inference_steps=16)
    first, second = by_component(pipe).values()
    assert first.startswith("CC.C") and second.startswith("CC.C")
    assert len(first + second) == 16


def test_conditions_that_change_begin_anew() -> None:
    def exchange(pipe: Any, index: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": 2 * tensors["prompt_embeds"]} if index == 3 else {}

    pipe = adaptive(tiny.build("wan"))
    call = {"output_type": "latent", "num_inference_steps": 12}
    tiny.run(pipe, "wan", **call)
    assert strip(pipe)["cond"].startswith("CC.C...C")
    more = {"callback_on_step_end": exchange, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    tiny.run(pipe, "wan", **call, **more)
    assert strip(pipe)["cond"].startswith("CC.CCC.C")


def test_a_loop_that_begins_late_trusts_its_first_step() -> None:
    firsts: dict[str, bool] = {}

    def look(pipe: Any, index: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        run = pipe.acceleration.run_in_progress()
        firsts.setdefault(family, run.state["cache.adaptive.steps"]["at"].tracks[0].history[0].first)
        return {}

    for family in ("flux", "flux_img2img"):
        call = {"output_type": "latent", "num_inference_steps": 6}
        tiny.run(adaptive(tiny.build(family)), family, **call, callback_on_step_end=look)
    assert firsts == {"flux": True, "flux_img2img": False}


@pytest.mark.parametrize("family", ["wan", "sd3"])
def test_beside_guidance_reuse(family: str) -> None:
    """Step control decides; a branch that guidance reuse answers is no reason to begin anew."""
    pipe = adaptive(tiny.build(family))
    call = {"output_type": "latent", "num_inference_steps": 12}
    tiny.run(pipe, family, **call)
    alone = by_component(pipe)
    pipe.enable_guidance_cache(interval=2)
    latents = tiny.run(pipe, family, **call)
    assert by_component(pipe) == alone and "..." in next(iter(alone.values())) and latents.isfinite().all()
    assert pipe.acceleration.report.stats["guidance.reuse"]["steps_reuse"] > 0


def test_interrupted() -> None:
    """`pipe._interrupt` between skipped steps: the next run is a fresh one."""

    def stop(pipe: Any, index: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = index >= 4
        return {}

    pipe = adaptive(tiny.build("flux"))
    call = {"output_type": "latent", "num_inference_steps": 10}
    fresh = tiny.run(pipe, "flux", **call)
    tiny.run(pipe, "flux", **call, callback_on_step_end=stop)
    assert torch.equal(tiny.run(pipe, "flux", **call), fresh)


@pytest.mark.slow
def test_two_modalities() -> None:
    """The second scheduler is nobody's concern: its outputs are the branch's own forecasts."""
    pipe = table.build("ltx2")
    plain = table.run(pipe, "ltx2", num_inference_steps=12)
    adaptive(pipe)
    ours = table.run(pipe, "ltx2", num_inference_steps=12)
    assert "." in "".join(strip(pipe).values())
    for found, wanted in zip(ours, plain, strict=True):
        assert found.isfinite().all() and 0 < (found - wanted).norm() / wanted.norm() < 0.5


# ---- what a reused step costs --------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts what waits for the device: `.item()`, `float(tensor)`, `bool(tensor)`, `.tolist()`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_reused_steps_wait_for_nothing_and_run_no_block() -> None:
    """From the end of a step to the end of the next one: one read more at computed steps than at plain ones."""
    pipe, counts = tiny.build("flux"), dict[int, tuple[int, int]]()
    blocks = [0]
    handle = tiny.blocks(tiny.denoiser(pipe))[0].register_forward_hook(lambda *_: blocks.__setitem__(0, blocks[0] + 1))
    pipe.set_progress_bar_config(disable=True)

    def counted() -> list[tuple[int, int]]:
        counts.clear()
        blocks[0] = 0

        def look(pipe: Any, index: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            counts[index] = (reads.count, blocks[0])
            return {}

        with Reads() as reads:
            call = {"output_type": "latent", "num_inference_steps": 12}
            tiny.run(pipe, "flux", **call, callback_on_step_end=look)
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts.values())]

    plain = counted()
    assert all(blocks == 1 for _, blocks in plain)
    adaptive(pipe)
    found, marks = counted(), strip(pipe)["cond"][1:]
    handle.remove()
    assert "." in marks
    for mark, (reads, ran), (before, _) in zip(marks, found, plain, strict=True):
        assert (ran, reads - before) in ([(0, 0)] if mark == "." else [(1, 0), (1, 1)]), marks


def test_inpainting() -> None:
    """The blend after each step is kept when the sampler goes back: outside the mask the picture's own latents."""
    known = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., :4] = 1  # to be painted

    def blend(pipe: Any, index: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        sigma = float(pipe.scheduler.sigmas[index + 1])
        noised = sigma * torch.ones_like(known) + (1 - sigma) * known
        return {"latents": mask * tensors["latents"] + (1 - mask) * noised}

    pipe = tiny.build("sd3")
    call = {"output_type": "latent", "num_inference_steps": 12, "callback_on_step_end": blend}
    plain = tiny.run(pipe, "sd3", **call)
    adaptive(pipe, cache_order=1, cache_correct=2)
    ours = tiny.run(pipe, "sd3", **call)
    assert strip(pipe)["cond_uncond"].count(".") >= 5
    assert torch.allclose((1 - mask) * ours, (1 - mask) * known, atol=1e-6)
    assert 0 < (ours - plain).norm() < 0.1 * plain.norm()
