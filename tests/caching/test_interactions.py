"""Step caches and what else goes on in a run: guidance, batches, image-to-image, schedulers, changes between runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, HeunDiscreteScheduler

from diffaccel import accelerate
from tests import tiny
from tests.models.families import table

from .coverage import COVERED, OPTIONS

ALL_SCOPES = ("first_block", "interval", "schedule", "easycache")  # blocks, modules, denoiser, denoiser by residual


def cached(pipe: Any, method: str, **options: Any) -> Any:
    """A method with the options under which it reuses, or with other ones."""
    return accelerate(pipe, preset=None, cache=method, **COVERED | OPTIONS[method] | options)


def strip(pipe: Any) -> dict[str, str]:
    return dict(pipe.acceleration.report.strip())


def gates(pipe: Any, branch: str) -> list[float | None]:
    return [step.gate for step in pipe.acceleration.report.steps if step.branch == branch]


def number(value: float | None) -> float:
    assert value is not None
    return value


# ---- guidance ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["first_block", "easycache", "dicache"])
@pytest.mark.parametrize("family", ["wan", "sd3"])
def test_guidance_of_one_has_the_same_hits(family: str, method: str) -> None:
    """Separate calls (Wan) and one batch (SD3): equal prompts change alike, so hits must not depend on guidance."""
    pipe = cached(tiny.build(family), method, cache_threshold=1e-12)
    same = {"negative_prompt": tiny.PROMPTS[0], "num_inference_steps": 8, "output_type": "latent"}
    tiny.run(pipe, family, **same)
    values = [gate for gate in gates(pipe, "cond" if family == "wan" else "cond_uncond") if gate is not None]
    cached(pipe, method, cache_threshold=2.5 * sorted(values)[len(values) // 2])
    tiny.run(pipe, family, **same)
    guided, with_guidance = strip(pipe), pipe.acceleration.report.hit_rate
    tiny.run(pipe, family, guidance_scale=1.0, **same)
    assert set(guided) == ({"cond", "uncond"} if family == "wan" else {"cond_uncond"})
    assert set(strip(pipe)) == {"cond"}
    assert set(guided.values()) == set(strip(pipe).values())
    assert 0 < pipe.acceleration.report.hit_rate == with_guidance < 1


def wan_loop(pipe: Any, steps: int, guided: Callable[[int], bool]) -> torch.Tensor:
    """A denoising loop of the user's own, whose unconditional branch comes and goes."""
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 16, 2, 4, 4, generator=generator)
    latents = latents[:, : pipe.transformer.config.in_channels]
    text = {name: torch.randn(1, tiny.TEXT_TOKENS, 32, generator=generator) for name in ("cond", "uncond")}
    with torch.no_grad(), pipe.acceleration.run():
        pipe.scheduler.set_timesteps(steps)
        for index, timestep in enumerate(pipe.scheduler.timesteps):
            found: dict[str, torch.Tensor] = {}
            for branch in ("cond", "uncond") if guided(index) else ("cond",):
                with pipe.transformer.cache_context(branch):
                    found[branch] = pipe.transformer(
                        hidden_states=latents,
                        timestep=timestep[None],
                        encoder_hidden_states=text[branch],
                        return_dict=False,
                    )[0]
            noise = found["cond"]
            if "uncond" in found:
                noise = found["uncond"] + 4.0 * (noise - found["uncond"])
            latents = pipe.scheduler.step(noise, timestep, latents, return_dict=False)[0]
    return latents


@pytest.mark.parametrize(
    ("method", "options", "cond", "uncond"),
    [
        ("first_block", {}, "C.......", "C..C.."),
        ("dicache", {}, "C.......", "C..C.."),
        ("schedule", {"cache_steps": [0]}, "C.......", "C..C.."),
        ("schedule", {"cache_steps": [0], "cache_scope": "modules"}, "C.......", "C..C.."),
        ("magcache", {"cache_max_steps": 9, "cache_retention": 0.0}, "C.......", "C..C.."),
        ("easycache", {"cache_branches": "each"}, "CC......", "CC.C.."),
        ("easycache", {"cache_branches": "first"}, "CC......", "CC.C.."),
    ],
)
def test_a_branch_that_was_away_is_computed(method: str, options: dict[str, Any], cond: str, uncond: str) -> None:
    """Guidance is off in steps 3 and 4 of 8: what the unconditional branch remembers is then too old."""
    pipe = cached(tiny.build("wan"), method, **options)
    result = wan_loop(pipe, 8, lambda index: index not in (3, 4))
    assert torch.isfinite(result).all()
    assert strip(pipe) == {"cond": cond, "uncond": uncond}
    wan_loop(pipe, 8, lambda index: True)
    assert strip(pipe) == {"cond": cond, "uncond": cond}, "negative control: without the gap"


def test_later_branches_follow_the_first() -> None:
    """`branches="first"`: at a threshold between the two branches' changes, each decides for itself or both alike."""
    call = {"negative_prompt": tiny.PROMPTS[3], "output_type": "latent"}
    pipe = cached(tiny.build("wan"), "first_block", cache_threshold=1e-12)
    tiny.run(pipe, "wan", **call)
    cond, uncond = number(gates(pipe, "cond")[1]), number(gates(pipe, "uncond")[1])
    assert cond != uncond
    between = (cond + uncond) / 2
    cached(pipe, "first_block", cache_threshold=between)
    tiny.run(pipe, "wan", **call)
    each = strip(pipe)
    assert each["cond"][1] != each["uncond"][1]
    cached(pipe, "first_block", cache_threshold=between, cache_branches="first")
    tiny.run(pipe, "wan", **call)
    first = strip(pipe)
    assert first["cond"] == first["uncond"] and first["cond"][:2] == each["cond"][:2]
    assert gates(pipe, "uncond") == [gates(pipe, "uncond")[0]] + [None] * (tiny.STEPS - 1), "only one branch asks"


@pytest.mark.parametrize("method", ["interval", "schedule", "easycache"])
def test_layers_skipped_for_guidance_are_a_branch_of_their_own(method: str) -> None:
    """SD3's skip-layer guidance: the extra call is computed as it is, and spoils nothing that is remembered."""
    call = {
        "skip_guidance_layers": [1],
        "skip_layer_guidance_start": 0.0,
        "skip_layer_guidance_stop": 0.9,
        "output_type": "latent",
    }
    pipe = cached(tiny.build("sd3"), method)
    tiny.run(pipe, "sd3", **call)
    extra = {branch: marks for branch, marks in strip(pipe).items() if branch != "cond_uncond"}
    whole = method in ("schedule", "easycache")  # caches of the whole output have a memory for the extra call, too
    assert extra and all((set(marks) == {"C"}) != whole for marks in extra.values())
    with_extra = strip(pipe)["cond_uncond"]
    assert any("skip_layers" in note for note in pipe.acceleration.report.notes) != whole
    tiny.run(pipe, "sd3", output_type="latent")
    assert strip(pipe) == {"cond_uncond": with_extra} and "." in with_extra


# ---- batches -----------------------------------------------------------------------------------------


def test_the_worst_sample_of_a_batch_decides() -> None:
    """`per_sample`: of two pictures one changes more; between its change and the mean, the mean would reuse."""
    pipe = tiny.build("flux")
    latents = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))
    latents[1] *= 5.0
    prompts = {"prompt": [tiny.PROMPTS[0], tiny.PROMPTS[1]], "output_type": "latent"}

    def second_gate(**options: Any) -> float:
        cached(pipe, "first_block", cache_threshold=1e-12, **options)
        tiny.run(pipe, "flux", latents=latents, **prompts)
        return number(gates(pipe, "cond")[1])

    def alone(sample: int) -> float:
        cached(pipe, "first_block", cache_threshold=1e-12)
        call = prompts | {"prompt": prompts["prompt"][sample]}
        tiny.run(pipe, "flux", latents=latents[sample : sample + 1], **call)
        return number(gates(pipe, "cond")[1])

    mean, worst = second_gate(), second_gate(cache_per_sample=True)
    each = [alone(0), alone(1)]
    assert worst == pytest.approx(max(each), rel=1e-3) and min(each) < mean < max(each)
    between = (mean + worst) / 2
    for per_sample, second in ((False, "."), (True, "C")):
        cached(pipe, "first_block", cache_threshold=between, cache_per_sample=per_sample)
        tiny.run(pipe, "flux", latents=latents, **prompts)
        assert strip(pipe)["cond"][1] == second


def test_forecast_errors_are_given_per_sample() -> None:
    pipe = cached(tiny.build("flux"), "schedule", cache_steps=[0, 1, 3])
    tiny.run(pipe, "flux", prompt=[tiny.PROMPTS[0], tiny.PROMPTS[1]], output_type="latent", num_inference_steps=5)
    errors = [step.forecast_error for step in pipe.acceleration.report.steps]
    assert [error is not None and len(error) for error in errors] == [False, 2, False, 2, False]
    found = errors[1]
    assert found is not None and found[0] != found[1] and all(error > 0 for error in found)


# ---- image-to-image and schedulers -------------------------------------------------------------------


def test_magcache_takes_the_ratios_of_the_steps_that_are_run() -> None:
    """Strength 0.5 of ten steps: the dip at the eighth calibrated step is the third one that is run."""
    ratios = [1.0] * 7 + [0.5, 1.0, 1.0]
    pipe = cached(tiny.build("flux_img2img"), "magcache", cache_ratios=ratios, cache_threshold=0.1, cache_max_steps=9)
    tiny.run(pipe, "flux_img2img", num_inference_steps=10, strength=0.5, output_type="latent")
    assert strip(pipe) == {"cond": "C.C.."}
    tiny.run(pipe, "flux_img2img", num_inference_steps=5, strength=1.0, output_type="latent")
    assert strip(pipe) == {"cond": "C..C."}, "a loop of all noise levels meets it at its fourth step of five"


SECOND_ORDER = {"sd3": FlowMatchHeunDiscreteScheduler, "pixart_alpha": HeunDiscreteScheduler}


@pytest.mark.parametrize("method", ALL_SCOPES)
@pytest.mark.parametrize("family", sorted(SECOND_ORDER))
def test_second_order_schedulers_are_left_alone(family: str, method: str) -> None:
    def run(pipe: Any) -> torch.Tensor:
        return table.run(pipe, family)[0]

    pipe = table.build(family)
    pipe.scheduler = SECOND_ORDER[family]()
    reference = run(pipe)
    cached(pipe, method)
    assert torch.equal(run(pipe), reference)
    report = pipe.acceleration.report
    assert report.hit_rate == 0 and report.cache_bytes_peak == 0
    assert any("order 2" in note for note in report.notes)
    pipe.scheduler = table.build(family).scheduler
    run(pipe)
    assert pipe.acceleration.report.hit_rate > 0, "negative control: with a first-order scheduler again"


# ---- other runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(OPTIONS))
def test_a_paused_run_goes_on_undisturbed(method: str) -> None:
    """Paused at step 2 for a whole run of another size and length: both pictures are those of alone."""
    call = {"true_cfg": True, "output_type": "latent"}
    other = {"prompt": tiny.PROMPTS[1], "seed": 5, "num_inference_steps": 5, "height": 12, "output_type": "latent"}
    pipe = cached(tiny.build("flux"), method)
    alone = tiny.run(pipe, "flux", **call)
    marks = strip(pipe)
    other_alone = tiny.run(pipe, "flux", **other)
    nested: list[torch.Tensor] = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            state = pipe.acceleration.snapshot()
            nested.append(tiny.run(pipe, "flux", **other))
            pipe.acceleration.resume(state)
        return kwargs

    result = tiny.run(pipe, "flux", callback_on_step_end=callback, **call)
    assert torch.equal(nested[0], other_alone), "the run in between was disturbed"
    assert torch.equal(result, alone) and strip(pipe) == marks and "." in marks["uncond"]


# ---- changes between runs ----------------------------------------------------------------------------


def other_weights(pipe: Any) -> None:
    """What another LoRA scale does to the weights: they change in place."""
    with torch.no_grad():
        for name, weight in pipe.transformer.named_parameters():
            if name.endswith("to_q.weight"):
                weight.mul_(1.5)


def other_dtype(pipe: Any) -> None:
    pipe.to(torch.bfloat16)


@pytest.mark.parametrize("change", [other_weights, other_dtype])
@pytest.mark.parametrize("method", ALL_SCOPES)
def test_nothing_is_stale_after_a_change(method: str, change: Callable[[Any], None]) -> None:
    call = {"output_type": "latent", "num_inference_steps": 5}
    pipe = cached(tiny.build("flux"), method)
    before = tiny.run(pipe, "flux", **call)
    change(pipe)
    after = tiny.run(pipe, "flux", **call)
    assert pipe.acceleration.report.hit_rate > 0
    fresh = tiny.build("flux")
    change(fresh)
    assert torch.equal(after, tiny.run(cached(fresh, method), "flux", **call))
    assert not torch.equal(after, before)
