"""Runs of every kind: what went before does not matter, pauses are not seen, and where it cannot act it says why."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchHeunDiscreteScheduler,
    StableDiffusionXLPAGPipeline,
)

from diffaccel import accelerate, restore
from tests import tiny
from tests.invariants.levers import REUSE_ALL, Stop, at_step, raise_at, second_prompt, second_size

from .helpers import done, reuse, stood_down, strips


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, so every run adds up in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(pipe: Any, family: str, **call: Any) -> torch.Tensor:
    """A guided call that returns latents."""
    guided = {"true_cfg": True} if family == "flux" and "true_cfg" not in call else {}
    return tiny.run(pipe, family, **{"output_type": "latent"} | guided | call)


def key(call: dict[str, Any]) -> tuple[Any, ...]:
    """A call as something to remember it by."""
    return tuple(sorted((name, tuple(value) if isinstance(value, list) else value) for name, value in call.items()))


@functools.cache
def _alone(family: str, call: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    pipe = reuse(tiny.build(family), **dict(options))
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in call}
    return run(pipe, family, **given), trace(pipe)


def alone(family: str, options: dict[str, Any] | None = None, **call: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Latents and calls of the first run of a fresh pipeline with the lever on."""
    return _alone(family, key(call), key(options or {}))


def trace(pipe: Any) -> tuple[Any, ...]:
    """(step, branch, computed) of every denoiser call of the last run."""
    return tuple((s.index, s.branch, s.computed) for s in pipe.acceleration.report.steps)


def assert_fresh(pipe: Any, family: str, **call: Any) -> None:
    """The next run is that of a fresh pipeline."""
    expected, calls = alone(family, **call)
    assert torch.equal(run(pipe, family, **call), expected) and trace(pipe) == calls


# ---- isolation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["wan", "sdxl"])
def test_change_of_call(family: str) -> None:
    """Size, steps, batch, guidance and prompt change from run to run; each run is that of a fresh pipeline."""
    two = {"prompt": list(tiny.PROMPTS[:2]), "negative_prompt": ["grey"] * 2}
    pipe = reuse(tiny.build(family))
    for call in ({}, second_size(family), {"num_inference_steps": 9}, two, tiny.no_guidance(family), {}):
        assert_fresh(pipe, family, **call)
    assert done(pipe) == (3, 3, 0)


@pytest.mark.parametrize("family", ["wan", "sd3"])
def test_after_an_exception(family: str) -> None:
    """Between steps, and inside of the denoiser (between the two calls of a step where there are two)."""
    pipe = reuse(tiny.build(family))
    with pytest.raises(Stop):
        run(pipe, family, callback_on_step_end=raise_at(2, Stop("callback")), **second_prompt())
    assert pipe.acceleration.report.cache_bytes_held == 0
    assert_fresh(pipe, family)
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise Stop("inside")

    model = tiny.denoiser(pipe)
    handle = model.proj_out.register_forward_pre_hook(fail)
    with pytest.raises(Stop):
        run(pipe, family, **second_prompt())
    handle.remove()
    assert pipe.acceleration.report.cache_bytes_held == 0 and not pipe.acceleration.report.completed
    assert_fresh(pipe, family)


@pytest.mark.parametrize("family", ["wan", "sd3"])
def test_change_of_dtype(family: str) -> None:
    pipe, new = reuse(tiny.build(family)), tiny.build(family)
    run(pipe, family)
    pipe.to(torch.bfloat16)
    new.to(torch.bfloat16)
    assert torch.equal(run(pipe, family), run(reuse(new), family))
    assert pipe.acceleration.report.cache_bytes_peak > 0


@pytest.mark.parametrize("family", ["wan"])
def test_two_pipelines(family: str) -> None:
    """One is restored, the other goes on; a plain one on the same denoiser stays plain."""
    first, second, third = (tiny.build(family) for _ in range(3))
    third.transformer = first.transformer
    reference = run(tiny.build(family), family)
    reuse(first)
    reuse(second)
    assert torch.equal(run(third, family), reference)
    assert_fresh(first, family)
    restore(first)
    assert torch.equal(run(first, family), reference)
    assert_fresh(second, family)


@pytest.mark.parametrize("family", ["sd3"])
def test_threads(family: str) -> None:
    """Two calls at once on one pipeline each give what they give alone."""
    pipe, found = reuse(tiny.build(family)), {}
    calls = [{"num_inference_steps": 8}, second_prompt(num_inference_steps=7)]

    def work(index: int) -> None:
        found[index] = run(pipe, family, **calls[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[index], alone(family, **call)[0]) for index, call in enumerate(calls))


@pytest.mark.parametrize("family", ["sd3"])
def test_guidance_switched_off_inside_of_a_run(family: str) -> None:
    """The way diffusers documents it. From then on the batch is a single one, and nothing is made up."""
    names = ["latents", "prompt_embeds", "pooled_prompt_embeds"]

    def off(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            given._guidance_scale = 0.0
            for name in names[1:]:
                kwargs[name] = kwargs[name][-1:]
        return kwargs

    call = {"callback_on_step_end": off, "callback_on_step_end_tensor_inputs": names}
    reference = run(tiny.build(family), family, **call)
    pipe = reuse(tiny.build(family), interval=1, sigma_high=1e9)  # listens, and leaves nothing out
    assert torch.equal(run(pipe, family, **call), reference) and done(pipe) == (3, 0, 0)
    assert run(reuse(pipe), family, **call).isfinite().all() and done(pipe) == (2, 1, 0)


# ---- pauses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["wan", "sd3"])
def test_a_nested_run(family: str) -> None:
    """Snapshot, another whole run of another size in the callback, resume: both are as alone."""
    other = second_prompt(num_inference_steps=7, **second_size(family))
    pipe, nested = reuse(tiny.build(family), order=1), []

    def act(given: Any) -> None:
        state = pipe.acceleration.snapshot()
        nested.append(run(pipe, family, **other))
        pipe.acceleration.resume(state)

    found = run(pipe, family, callback_on_step_end=at_step(2, act))
    expected, calls = alone(family, {"order": 1})
    assert torch.equal(found, expected) and trace(pipe) == calls
    assert torch.equal(nested[0], alone(family, {"order": 1}, **other)[0])


RESUMED = [("wan", 0, {}), ("wan", 3, {"order": 1}), ("wan22", 3, {}), ("sd3", 2, {"order": 2}), ("sd3", 5, {})]
RESUMED += [("sdxl", 0, {"interval": 1, "start": 0.5}), ("wan", 1, {"start": 0.5})]


@pytest.mark.parametrize(("family", "at", "options"), RESUMED)
def test_a_run_given_up_is_resumed(family: str, at: int, options: dict[str, Any]) -> None:
    """Also after steps that ran half a batch only, whose outputs a resumed run asks for by the pipeline's name."""
    pipe, states = reuse(tiny.build(family), **options), []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == at and not states:
            states.append(pipe.acceleration.snapshot())
            raise Stop
        return kwargs

    with pytest.raises(Stop):
        run(pipe, family, callback_on_step_end=callback)
    run(pipe, family, **second_prompt())
    found = tiny.output(pipe.acceleration.resume(states[0]))
    expected, calls = alone(family, options)
    assert torch.equal(found, expected) and trace(pipe) == calls and stood_down(pipe) == ""
    assert_fresh(reuse(pipe), family)


# ---- standing down -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_few_steps(family: str) -> None:
    """The default guard of nine steps."""
    pipe = accelerate(tiny.build(family), preset=None, guidance="reuse")
    assert torch.equal(run(pipe, family), run(tiny.build(family), family))
    assert "fewer than min_steps=9" in stood_down(pipe)
    assert "min_steps=9" in pipe.acceleration.plan.items[0].reason
    run(pipe, family, num_inference_steps=10)
    assert stood_down(pipe) == "" and done(pipe) == (6, 4, 0)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("wan", {"schedule": "1010"}, "the schedule has 4 entries, and the loop has 6 steps"),
        ("sdxl", {"schedule": [0, 7]}, "names step 7"),
        ("sdxl", {"sigma_low": 0.5}, "this scheduler gives none"),
        ("sdxl", {"order": 1, "coordinate": "sigma"}, "this scheduler gives none"),
        ("sd3", {}, "FlowMatchHeunDiscreteScheduler calls the denoiser more than once per step"),
    ],
)
def test_it_stands_down_for_the_run(family: str, options: dict[str, Any], reason: str) -> None:
    """The picture is the plain one, and report and plan say why."""
    pipe = tiny.build(family)
    if family == "sd3":
        pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    if "sigma" in str(options):
        pipe.scheduler = DDIMScheduler()
    reference = run(pipe, family)
    assert torch.equal(run(reuse(pipe, **options), family), reference)
    assert reason in stood_down(pipe) and reason in pipe.acceleration.plan.items[0].reason
    assert pipe.acceleration.report.hit_rate == 0 and done(pipe) == (0, 0, 0)


def test_perturbed_attention_guidance() -> None:
    """A third branch in the batch."""
    parts = tiny.build("sdxl").components
    pipe = StableDiffusionXLPAGPipeline(**parts, pag_applied_layers="mid", add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    reference = run(pipe, "sdxl")
    assert torch.equal(run(reuse(pipe), "sdxl"), reference)
    assert "perturbed-attention guidance adds a branch" in stood_down(pipe)


def test_without_guidance() -> None:
    """Guidance 1.0 in the batched and the two-call form."""
    for family in ("wan", "sdxl"):
        pipe = reuse(tiny.build(family))
        assert torch.equal(run(pipe, family, guidance_scale=1.0), run(tiny.build(family), family, guidance_scale=1.0))
        assert "this call ran without an unconditional branch" in stood_down(pipe)


def hand_written(pipe: Any, order: tuple[str, ...], steps: int | None = 6, grad: bool = False) -> list[torch.Tensor]:
    """A loop of the user's own over the transformer, in named branches; what each call returned."""
    calls: list[Any] = []
    plain = tiny.build("wan")
    plain.transformer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    run(plain, "wan")
    found = []
    with torch.set_grad_enabled(grad), pipe.acceleration.run(num_inference_steps=steps) as current:
        if steps is None:
            pipe.scheduler.timesteps, pipe._num_timesteps = None, None
            current.total = None
        for step in range(6):
            for branch in order:
                args, kwargs = calls[2 * step + (branch == "uncond")]
                with pipe.transformer.cache_context(branch):
                    found.append(pipe.transformer(*args, **kwargs)[0].detach())
            current.tick(None)
    return found


@pytest.mark.parametrize(
    ("order", "more", "reason"),
    [
        (("cond", "uncond"), {}, ""),
        (("uncond", "cond"), {}, "the unconditional call comes before the conditional one"),
        (("uncond",), {}, "the unconditional call comes before the conditional one"),
        (("cond", "uncond"), {"grad": True}, "gradients are enabled"),
        (("cond", "uncond"), {"steps": None}, "the number of steps is unknown"),
    ],
)
def test_loops_written_by_hand(order: tuple[str, ...], more: dict[str, Any], reason: str) -> None:
    options = {"last_steps": 1} if "steps" in more else {}
    pipe = reuse(tiny.build("wan"), **options)
    expected = hand_written(reuse(tiny.build("wan"), interval=1), order, **more)
    found = hand_written(pipe, order, **more)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) is bool(reason)
    assert reason in stood_down(pipe) and bool(reason) is bool(stood_down(pipe))
    if not reason:
        assert strips(pipe) == {"cond": "CCCCCC", "uncond": "C.C.C."}


@torch.no_grad()
def test_what_was_stored_is_not_used_for_something_else() -> None:
    """A second loop in the same run, and other shapes in the middle of a loop, begin anew."""
    pipe = reuse(tiny.build("wan"), interval=100, first_steps=0)
    text = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1))

    def step(current: Any, count: int = 1, frames: int = 2) -> None:
        for _ in range(count):
            for branch in ("cond", "uncond"):
                with pipe.transformer.cache_context(branch):
                    pipe.transformer(torch.ones(1, 16, frames, 4, 4), torch.tensor([500]), text)
            current.tick(None)

    with pipe.acceleration.run() as current:
        pipe.scheduler.set_timesteps(3)
        step(current, 3)
        pipe.scheduler.set_timesteps(6)
        step(current, 3)
        step(current, 1, frames=1)
        step(current, 2)
    assert strips(pipe)["uncond"] == "C..C..CC." and done(pipe) == (4, 5, 0)


# ---- with a cache ------------------------------------------------------------------------------------


def stacked(pipe: Any, threshold: float) -> Any:
    """Guidance reuse under a first-block cache, neither with a guard in the way."""
    cache = {"cache": "first_block", "cache_threshold": threshold, "cache_min_steps": 0, "cache_last_steps": 0}
    wishes = {"guidance_interval": 3, "guidance_first_steps": 1, "guidance_last_steps": 0, "guidance_min_steps": 0}
    return accelerate(pipe, preset=None, guidance="reuse", **cache, **wishes)


@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_stacked_with_a_cache(family: str) -> None:
    """A cache that is off changes nothing; one that always reuses keeps its hands off what is answered already."""
    pipe = stacked(tiny.build(family), 0.0)
    expected, calls = alone(family, {"interval": 3})
    assert torch.equal(run(pipe, family), expected) and trace(pipe) == calls

    stacked(pipe, REUSE_ALL)
    found = run(pipe, family)
    assert found.isfinite().all() and not torch.equal(found, expected) and done(pipe) == (2, 4, 0)
    report = pipe.acceleration.report
    assert report.cache_bytes_held == 0 and report.cache_bytes_peak > 0
    if family == "sd3":  # what the whole batch taught holds for its half
        assert {branch: strip[0] for branch, strip in strips(pipe).items()} == {"cond_uncond": "C", "cond": "."}
    else:
        assert strips(pipe)["uncond"][0] == "C" and strips(pipe)["cond"] == "C....."
    assert torch.equal(run(pipe, family), found)
    restore(pipe)
    assert torch.equal(run(pipe, family), run(tiny.build(family), family))
