"""Invariant 3: whatever happened before, the next run equals that of a fresh pipeline with that setting."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from diffaccel import attach, restore
from tests import tiny

from .levers import (
    CACHES,
    Stop,
    accelerated,
    at_step,
    fresh,
    fresh_run,
    plain,
    put_on,
    raise_at,
    second_prompt,
    second_size,
    trace,
)


def assert_fresh(pipe: Any, family: str, **call: Any) -> None:
    """The next run of `pipe` gives the picture and the hits of a fresh cached pipeline."""
    result = tiny.run(pipe, family, **call)
    reference, records = fresh_run(family, "cache", **call)
    assert torch.equal(result, reference), f"{family} {call}: differs from a fresh pipeline"
    assert trace(pipe) == records


def changes(family: str) -> dict[str, dict[str, Any]]:
    """Calls that differ from the standard call in one respect each."""
    number = "num_videos_per_prompt" if family == "wan" else "num_images_per_prompt"
    guidance = {"true_cfg": True} if family == "flux" else {"guidance_scale": 1.0}
    return {
        "size": second_size(family),
        "more steps": {"num_inference_steps": 9},
        "fewer steps": {"num_inference_steps": 3},
        "two prompts": {"prompt": [*tiny.PROMPTS[:2]]},
        "two per prompt": {number: 2},
        "guidance": guidance,
        "prompt": second_prompt(),
    }


CHANGES = [(family, kind) for family in CACHES for kind in changes(family)]
CHANGES += [("sdxl", "size"), ("sdxl", "two prompts"), ("sdxl", "guidance")]


@pytest.mark.parametrize(("family", "kind"), CHANGES)
def test_change_of_call(family: str, kind: str) -> None:
    """Standard call, changed call, standard call: each as on a fresh pipeline."""
    pipe = accelerated(family, "cache")
    assert_fresh(pipe, family)
    assert_fresh(pipe, family, **changes(family)[kind])
    assert_fresh(pipe, family)


@pytest.mark.parametrize("family", CACHES)
def test_hits_do_happen(family: str) -> None:
    """The comparisons of this file are about something: steps are reused, and others are not."""
    computed = [flag for _, _, flag in fresh_run(family)[1]]
    assert True in computed and False in computed
    assert not torch.equal(fresh(family), plain(family))


def _break_callback(pipe: Any, family: str) -> None:
    with pytest.raises(Stop):
        tiny.run(pipe, family, callback_on_step_end=raise_at(3, Stop("callback")), **second_prompt())


def _break_keyboard(pipe: Any, family: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny.run(pipe, family, callback_on_step_end=raise_at(3, KeyboardInterrupt()), **second_prompt())


def _break_forward(pipe: Any, family: str) -> None:
    """An error inside the denoiser, after its blocks, as an out-of-memory error would be."""
    model = tiny.denoiser(pipe)
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise Stop("out of memory")

    handle = (model.conv_out if hasattr(model, "conv_out") else model.proj_out).register_forward_pre_hook(fail)
    with pytest.raises(Stop):
        tiny.run(pipe, family, **second_prompt())
    handle.remove()


def _break_block(pipe: Any, family: str) -> None:
    """An error inside the first block, at the fourth call."""
    blocks = tiny.blocks(tiny.denoiser(pipe))
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise Stop("in a block")

    target = blocks[0] if blocks else tiny.denoiser(pipe).mid_block
    handle = target.register_forward_hook(fail)
    with pytest.raises(Stop):
        tiny.run(pipe, family, **second_prompt())
    handle.remove()


def _break_decode(pipe: Any, family: str) -> None:
    def fail(*_: Any) -> None:
        raise Stop("decode")

    handle = pipe.vae.decoder.register_forward_pre_hook(fail)
    with pytest.raises(Stop):
        tiny.run(pipe, family, **second_prompt())
    handle.remove()


def _interrupt_argument(pipe: Any, family: str) -> None:
    """The way diffusers documents it: the callback sets it on the pipeline it is given."""
    act = at_step(2, lambda given: setattr(given, "_interrupt", True))
    tiny.run(pipe, family, callback_on_step_end=act, **second_prompt())


def _interrupt_outer(pipe: Any, family: str) -> None:
    """The way user interfaces do it: they set it on the pipeline they hold."""
    act = at_step(2, lambda _: setattr(pipe, "_interrupt", True))
    tiny.run(pipe, family, callback_on_step_end=act, **second_prompt())


BREAKS: dict[str, Callable[[Any, str], None]] = {
    "callback": _break_callback,
    "keyboard": _break_keyboard,
    "forward": _break_forward,
    "block": _break_block,
    "decode": _break_decode,
    "interrupt by argument": _interrupt_argument,
    "interrupt from outside": _interrupt_outer,
}


BROKEN = [("flux", kind) for kind in BREAKS]
BROKEN += [("wan", kind) for kind in ("callback", "forward", "block", "interrupt from outside")]
BROKEN += [("sd3", kind) for kind in ("callback", "block", "decode", "interrupt by argument")]
BROKEN += [("sdxl", kind) for kind in ("callback", "forward", "interrupt by argument")]


@pytest.mark.parametrize(("family", "kind"), BROKEN)
def test_after_a_broken_run(family: str, kind: str) -> None:
    """After a broken run the same call and a call of another size are those of a fresh pipeline."""
    pipe = accelerated(family, "cache")
    BREAKS[kind](pipe, family)
    assert_fresh(pipe, family)
    BREAKS[kind](pipe, family)
    assert_fresh(pipe, family, **second_size(family))


@pytest.mark.parametrize("outside", [False, True], ids=["by argument", "from outside"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_interrupt_stops_the_run(family: str, outside: bool) -> None:
    """An interrupted run ends after the same step and gives the same picture as on a plain pipeline."""

    def stop_early(pipe: Any) -> tuple[torch.Tensor, int]:
        seen = []

        def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            seen.append(index)
            if index == 2:
                (pipe if outside else given)._interrupt = True
            return kwargs

        return tiny.run(pipe, family, callback_on_step_end=callback), len(seen)

    reference, steps = stop_early(tiny.build(family))
    assert steps == 3
    pipe = attach(tiny.build(family))
    result, seen = stop_early(pipe)
    assert seen == 3, "the run did not stop"
    assert torch.equal(result, reference)
    assert torch.equal(tiny.run(pipe, family), plain(family)), "the next run is a whole one"


def tensor_census() -> Counter[tuple[int, ...]]:
    """How many floating-point tensors of each shape are alive."""
    gc.collect()
    return Counter(
        tuple(thing.shape)
        for thing in gc.get_objects()
        if type(thing) is torch.Tensor and thing.is_floating_point() and thing.ndim >= 2
    )


@pytest.mark.parametrize("broken", [False, True], ids=["after a run", "after an exception"])
@pytest.mark.parametrize("family", CACHES)
def test_no_cached_tensor_outlives_the_run(family: str, broken: bool) -> None:
    """The run lets go of what it cached: no tensor of a hidden state's shape stays alive."""
    plain_pipe = tiny.build(family)
    tiny.run(plain_pipe, family)
    pipe = accelerated(family, "cache")
    before = tensor_census()
    if broken:
        _break_callback(pipe, family)
    else:
        tiny.run(pipe, family)
    left = tensor_census() - before
    width = tiny.blocks(pipe.transformer)[0].norm1.linear.out_features // 6 if family != "wan" else 32
    assert not {shape: number for shape, number in left.items() if len(shape) == 3 and shape[-1] == width}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_change_of_dtype(family: str) -> None:
    """fp32, bfloat16, fp32 again (now with rounded weights): each as on a fresh pipeline brought there."""
    pipe = accelerated(family, "cache")
    assert_fresh(pipe, family)
    path: list[torch.dtype] = []
    for dtype in (torch.bfloat16, torch.float32):
        path.append(dtype)
        pipe.to(dtype)
        new = tiny.build(family)
        for step in path:
            new.to(step)
        put_on(new, family, "cache")
        assert torch.equal(tiny.run(pipe, family), tiny.run(new, family)), dtype
        assert trace(pipe) == trace(new)
        assert tiny.denoiser(pipe).dtype == dtype


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_change_of_scheduler(family: str) -> None:
    """A scheduler swapped in by the user is the one that runs."""

    def other() -> Any:
        return DDIMScheduler() if family == "sdxl" else FlowMatchEulerDiscreteScheduler(shift=7.0)

    untouched = tiny.build(family)
    untouched.scheduler = other()
    reference = tiny.run(untouched, family)
    new = tiny.build(family)
    new.scheduler = other()
    cached = tiny.run(put_on(new, family, "cache"), family)

    attached = attach(tiny.build(family))
    tiny.run(attached, family)
    attached.scheduler = other()
    assert torch.equal(tiny.run(attached, family), reference)

    pipe = accelerated(family, "cache")
    tiny.run(pipe, family)
    pipe.scheduler = other()
    assert torch.equal(tiny.run(pipe, family), cached)
    assert not torch.equal(cached, fresh(family))


@pytest.mark.parametrize("family", CACHES)
def test_change_of_transformer(family: str) -> None:
    """A transformer swapped in by the user is accelerated like the first; the old one is let go."""
    pipe, other = tiny.build(family), tiny.build(family, seed=1)
    reference = tiny.run(put_on(tiny.build(family), family, "cache"), family)
    old = pipe.transformer
    put_on(pipe, family, "cache")
    assert torch.equal(tiny.run(pipe, family), reference)
    pipe.transformer = other.transformer
    twin = tiny.build(family)
    twin.transformer = tiny.build(family, seed=1).transformer
    exact = tiny.run(twin, family)
    put_on(twin, family, "cache")
    assert torch.equal(tiny.run(pipe, family), tiny.run(twin, family))
    assert trace(pipe) == trace(twin)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), exact)
    for model in (old, other.transformer):
        assert not [path for path, module in model.named_modules() if "forward" in vars(module)]
    pipe.transformer = old
    assert torch.equal(tiny.run(pipe, family), plain(family))


def guidance_off(family: str, at: int) -> dict[str, Any]:
    """A call that switches guidance off at the end of a step, as diffusers' documentation shows it."""
    names = {
        "sd3": ["latents", "prompt_embeds", "pooled_prompt_embeds"],
        "sdxl": ["latents", "prompt_embeds", "add_text_embeds", "add_time_ids"],
    }.get(family, ["latents"])

    def callback(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == at:
            pipe._guidance_scale = 0.0
            for name in names[1:]:
                kwargs[name] = kwargs[name][-1:]
        return kwargs

    return {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": names}


@pytest.mark.parametrize("family", ["wan", "sd3", "sdxl"])
def test_change_inside_a_run(family: str) -> None:
    """Guidance switched off in mid-run: exact without a cache; the cache goes on with the half that is left."""
    reference = tiny.run(tiny.build(family), family, **guidance_off(family, 2))
    assert not torch.equal(reference, plain(family))
    pipe = attach(tiny.build(family))
    assert torch.equal(tiny.run(pipe, family, **guidance_off(family, 2)), reference)
    put_on(pipe, family, "cache", cache_threshold=0.0)
    assert torch.equal(tiny.run(pipe, family, **guidance_off(family, 2)), reference)
    put_on(pipe, family, "cache", cache_threshold=1e9)
    assert torch.isfinite(tiny.run(pipe, family, **guidance_off(family, 2))).all()
    if family == "wan":
        assert [index for index, name, _ in trace(pipe) if name == "uncond"] == [0, 1, 2]
    if family == "sd3":
        steps = [computed for _, _, computed in trace(pipe)]
        assert steps == [True, False, False, False, False, False], "the conditional half goes on from the whole batch"
    put_on(pipe, family, "cache")
    assert_fresh(pipe, family)
