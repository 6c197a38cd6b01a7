"""Invariant 4: steps come from the run's own scheduler, branches from the pipeline, never from guesses."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, HeunDiscreteScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from diffaccel import accelerate, attach
from tests import tiny

from .levers import CACHES, REUSE_ALL, THRESHOLD, accelerated, cache_options, pattern, plain, put_on, trace


def by_branch(pipe: Any) -> dict[str, list[int]]:
    """The step indexes of the last run, per branch."""
    found: dict[str, list[int]] = defaultdict(list)
    for index, branch, _ in trace(pipe):
        found[branch].append(index)
    return dict(found)


BRANCHES = [
    ("flux", {}, {"cond"}),
    ("flux", {"true_cfg": True}, {"cond", "uncond"}),
    ("wan", {}, {"cond", "uncond"}),
    ("wan", {"guidance_scale": 1.0}, {"cond"}),
]


@pytest.mark.parametrize("lever", ["cache", "attach"])
@pytest.mark.parametrize(("family", "call", "names"), BRANCHES)
def test_named_branches(family: str, call: dict[str, Any], names: set[str], lever: str) -> None:
    """Families that call once per branch: names from cache_context, every step once in each, in order."""
    pipe = accelerated(family, lever)
    tiny.run(pipe, family, **call)
    assert by_branch(pipe) == {name: list(range(tiny.STEPS)) for name in names}
    steps = pipe.acceleration.report.steps
    assert [step.index for step in steps] == sorted(step.index for step in steps)
    assert len({step.timestep for step in steps}) == tiny.STEPS


@pytest.mark.parametrize("lever", ["cache", "attach"])
@pytest.mark.parametrize("guided", [True, False], ids=["guided", "unguided"])
@pytest.mark.parametrize("family", ["sd3", "sdxl"])
def test_batched_guidance_is_one_branch(family: str, guided: bool, lever: str) -> None:
    """Families that batch both branches: one call, one branch name, every step once."""
    pipe = accelerated(family, lever)
    tiny.run(pipe, family, **({} if guided else tiny.no_guidance(family)))
    assert list(by_branch(pipe).values()) == [list(range(tiny.STEPS))]


def test_image_to_image_starts_in_the_middle() -> None:
    """A pipeline without contexts that skips the first steps: one branch, indexes rise by one."""
    pipe = accelerated("flux_img2img", "cache", cache_threshold=REUSE_ALL)
    tiny.run(pipe, "flux_img2img")
    (indexes,) = by_branch(pipe).values()
    assert indexes == list(range(indexes[0], indexes[0] + len(indexes)))
    assert pattern(pipe) == [True] + [False] * (len(indexes) - 1)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_colliding_timesteps(family: str) -> None:
    """In bfloat16 with shift 7 and 50 steps some steps carry one timestep value; the indexes stay apart."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    scheduler.set_timesteps(50)
    assert len(set(scheduler.timesteps.to(torch.bfloat16).tolist())) < 50, "the precondition of this test"
    pipe = tiny.build(family, dtype=torch.bfloat16)
    pipe.scheduler = scheduler
    put_on(pipe, family, "cache", cache_threshold=REUSE_ALL)
    tiny.run(pipe, family, num_inference_steps=50)
    assert list(by_branch(pipe).values()) == [list(range(50))]
    assert pattern(pipe) == [True] + [False] * 49


@pytest.mark.parametrize("family", ["sd3", "sdxl"])
def test_second_order_scheduler(family: str) -> None:
    """Heun calls the denoiser twice per sigma: each call is a step of its own."""
    pipe = tiny.build(family)
    pipe.scheduler = HeunDiscreteScheduler() if family == "sdxl" else FlowMatchHeunDiscreteScheduler()
    reference = tiny.run(pipe, family)
    put_on(pipe, family, "cache", cache_threshold=0.0)
    assert torch.equal(tiny.run(pipe, family), reference)
    (indexes,) = by_branch(pipe).values()
    assert indexes == list(range(2 * tiny.STEPS - 1))


@pytest.mark.parametrize("family", tiny.SEQUENTIAL_CFG)
def test_guidance_does_not_change_the_hits_of_cond(family: str) -> None:
    """With the negative prompt equal to the prompt: same picture and hits with and without guidance."""
    same = {"negative_prompt": tiny.PROMPTS[0], "num_inference_steps": 10}
    pipe = accelerated(family, "cache")
    guided = tiny.run(pipe, family, true_cfg=family == "flux", **same)
    cond, uncond = pattern(pipe, "cond"), pattern(pipe, "uncond")
    unguided = tiny.run(pipe, family, **tiny.no_guidance(family), **same)
    assert torch.equal(guided, unguided)
    assert cond == uncond == pattern(pipe, "cond")
    assert True in cond and False in cond


@pytest.mark.parametrize("family", tiny.SEQUENTIAL_CFG)
def test_branches_do_not_mix(family: str) -> None:
    """The prediction of cond in a step is the same whether or not uncond also runs and is cached."""
    first: dict[bool, list[torch.Tensor]] = {}
    for guided in (True, False):
        pipe = accelerated(family, "cache", cache_threshold=REUSE_ALL)
        outputs: list[torch.Tensor] = []

        def note(*arguments: Any, outputs: list[torch.Tensor] = outputs) -> None:
            outputs.append(arguments[-1][0])

        handle = pipe.transformer.register_forward_hook(note)
        call = {"true_cfg": True} if family == "flux" else {}
        tiny.run(pipe, family, num_inference_steps=1, **(call if guided else tiny.no_guidance(family)))
        handle.remove()
        assert len(outputs) == 1 + guided
        first[guided] = outputs
    assert torch.equal(first[True][0], first[False][0])
    assert not torch.equal(first[True][0], first[True][1])


def recorded_calls(family: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of all denoiser calls of a plain run."""
    pipe = tiny.build(family)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, dict(kwargs)))

    handle = tiny.denoiser(pipe).register_forward_pre_hook(note, with_kwargs=True)
    tiny.run(pipe, family)
    handle.remove()
    return calls


def first_tensor(value: Any) -> torch.Tensor:
    """The tensor of a denoiser's result."""
    found: torch.Tensor = value[0] if isinstance(value, tuple) else value.sample
    return found


DIRECT = [(family, False) for family in tiny.FAMILIES] + [(family, True) for family in tiny.SEQUENTIAL_CFG]


@pytest.mark.parametrize(("family", "named"), DIRECT)
def test_direct_calls_stand_down(family: str, named: bool) -> None:
    """Without a run no step can be seen: direct calls are bit-equal to plain, before and after runs."""
    calls = recorded_calls(family)
    twin = tiny.denoiser(tiny.build(family))
    pipe = accelerated(family, "cache", cache_threshold=REUSE_ALL)
    model = tiny.denoiser(pipe)
    with torch.no_grad():
        for _ in range(2):
            for args, kwargs in [*calls[:3], calls[0], calls[0]]:
                if named:
                    with model.cache_context("cond"):
                        found = model(*args, **kwargs)
                else:
                    found = model(*args, **kwargs)
                assert torch.equal(first_tensor(found), first_tensor(twin(*args, **kwargs)))
            tiny.run(pipe, family)


@pytest.mark.parametrize("family", CACHES)
def test_a_direct_call_inside_a_callback(family: str) -> None:
    """A denoiser call of the user's own between two steps is no call of the run: same picture and steps."""
    calls = recorded_calls(family)
    undisturbed = accelerated(family, "cache")
    reference = tiny.run(undisturbed, family)
    pipe = accelerated(family, "cache")

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            args, named = calls[0]
            with torch.no_grad():
                given.transformer(*args, **named)
        return kwargs

    result = tiny.run(pipe, family, callback_on_step_end=callback)
    assert torch.equal(result, reference)
    assert trace(pipe) == trace(undisturbed)


class Syncs(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", CACHES)
def test_one_host_sync_per_compared_step(family: str) -> None:
    """Attaching adds none; the cache adds at most one per denoiser call, none to the first step."""

    def syncs(pipe: Any) -> int:
        tiny.run(pipe, family)
        with Syncs() as mode:
            tiny.run(pipe, family)
        return mode.count

    pipe = tiny.build(family)
    base = syncs(pipe)
    assert syncs(attach(pipe)) == base
    accelerate(pipe, preset=None, **cache_options(family))
    calls = 2 if family == "wan" else 1
    assert base < syncs(pipe) <= base + calls * (tiny.STEPS - 1)
    assert THRESHOLD[family] > 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_report(family: str) -> None:
    """The report counts calls and hits and times three stages; the callback sees the run's own pipeline."""
    pipe = accelerated(family, "cache")
    seen = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append((type(given).__name__, given.num_timesteps, tiny.denoiser(given) is tiny.denoiser(pipe)))
        return kwargs

    tiny.run(pipe, family, callback_on_step_end=callback)
    assert set(seen) == {(type(tiny.build(family)).__name__, tiny.STEPS, True)}
    report = pipe.acceleration.report
    flags = [step.computed for step in report.steps]
    assert len(flags) == tiny.STEPS * (2 if family == "wan" else 1)
    assert report.hit_rate == pytest.approx(flags.count(False) / len(flags))
    assert set(report.stages) == {"encode", "denoise", "decode"}
    assert all(seconds >= 0 for seconds in report.stages.values()) and report.stages["denoise"] > 0
    if family == "sdxl":
        assert all(flags) and torch.equal(tiny.run(pipe, family), plain(family))
