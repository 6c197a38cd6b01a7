"""Invariant 3: whatever happened before, the next run equals that of a fresh pipeline with that setting."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline

from diffaccel import attach, restore
from diffaccel.errors import DiffaccelError, IncompatibleError
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
    """Guidance switched off in mid-run: exact without a cache; the cache computes where its batch changed."""
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
        assert [computed for _, _, computed in trace(pipe)] == [True, False, False, True, False, False]
    put_on(pipe, family, "cache")
    assert_fresh(pipe, family)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_two_pipelines_of_one_class(family: str) -> None:
    """One restored, one not, one never touched: each does its own thing."""
    first, second, third = (tiny.build(family) for _ in range(3))
    put_on(first, family, "cache")
    put_on(second, family, "cache")
    assert torch.equal(tiny.run(first, family), fresh(family))
    restore(first)
    assert torch.equal(tiny.run(second, family), fresh(family))
    assert torch.equal(tiny.run(first, family), plain(family))
    assert torch.equal(tiny.run(third, family), plain(family))
    assert torch.equal(tiny.run(second, family), fresh(family))


def shared_pair() -> tuple[Any, Any]:
    """Flux text-to-image and image-to-image pipelines on the same modules."""
    first = tiny.build("flux")
    second = FluxImg2ImgPipeline(**first.components)
    second.set_progress_bar_config(disable=True)
    return first, second


@pytest.mark.parametrize("lever", ["cache", "attention", "both"])
def test_plain_pipeline_on_an_accelerated_transformer(lever: str) -> None:
    """A pipeline nobody accelerated stays exact although it shares a transformer with an accelerated one."""
    first, second = shared_pair()
    put_on(first, "flux", lever)
    for _ in range(2):
        assert torch.equal(tiny.run(first, "flux"), fresh("flux", lever))
        assert torch.equal(tiny.run(second, "flux_img2img"), plain("flux_img2img"))


def test_shared_transformer_attached_twice() -> None:
    """The second attach works for both or is refused by name, and then the first is as it was."""
    first, second = shared_pair()
    put_on(first, "flux", "cache")
    before = tiny.snapshot_pipe(second)
    try:
        put_on(second, "flux_img2img", "cache")
    except IncompatibleError as error:
        assert "transformer" in str(error)
        tiny.assert_same(before, tiny.snapshot_pipe(second))
        assert torch.equal(tiny.run(second, "flux_img2img"), plain("flux_img2img"))
        assert torch.equal(tiny.run(first, "flux"), fresh("flux"))
        return
    for _ in range(2):
        assert torch.equal(tiny.run(first, "flux"), fresh("flux"))
        assert torch.equal(tiny.run(second, "flux_img2img"), fresh("flux_img2img"))
    restore(first)
    assert torch.equal(tiny.run(first, "flux"), plain("flux"))
    assert torch.equal(tiny.run(second, "flux_img2img"), fresh("flux_img2img"))
    restore(second)
    assert torch.equal(tiny.run(second, "flux_img2img"), plain("flux_img2img"))
    assert torch.equal(tiny.run(first, "flux"), plain("flux"))


def test_the_first_pipeline_is_gone() -> None:
    """An accelerated pipeline that was dropped without restore does not block or disturb the next one."""
    first, second = shared_pair()
    put_on(first, "flux", "both")
    tiny.run(first, "flux")
    del first
    gc.collect()
    put_on(second, "flux_img2img", "cache")
    assert torch.equal(tiny.run(second, "flux_img2img"), fresh("flux_img2img"))
    restore(second)
    assert torch.equal(tiny.run(second, "flux_img2img"), plain("flux_img2img"))


def test_nested_run_of_a_pipeline_that_shares_the_transformer() -> None:
    """A plain pipeline run from a callback of the accelerated one disturbs neither."""
    first, second = shared_pair()
    second.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)  # plain diffusers cannot share one either
    put_on(first, "flux", "cache")
    nested = []
    act = at_step(2, lambda _: nested.append(tiny.run(second, "flux_img2img")))
    assert torch.equal(tiny.run(first, "flux", callback_on_step_end=act), fresh("flux"))
    assert torch.equal(nested[0], plain("flux_img2img"))


@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_deepcopy_of_the_transformer(family: str) -> None:
    """A copy of an accelerated transformer computes with its own weights, or is refused until restore."""
    pipe = accelerated(family, "cache")
    tiny.run(pipe, family)
    try:
        clone = copy.deepcopy(pipe.transformer)
    except DiffaccelError as error:
        assert "deepcopy" in str(error)
        clone = copy.deepcopy(restore(pipe).transformer)
        put_on(pipe, family, "cache")
    other = tiny.build(family)
    other.transformer = clone
    assert torch.equal(tiny.run(other, family), plain(family))
    with torch.no_grad():
        for block in tiny.blocks(clone):
            for parameter in block.parameters():
                parameter.mul_(0.5)
    assert not torch.equal(tiny.run(other, family), plain(family)), "the copy computes with the original"
    assert torch.equal(tiny.run(pipe, family), fresh(family))


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_deepcopy_of_the_pipeline(family: str) -> None:
    """A deep copy of an accelerated pipeline works on its own, or is refused until restore."""
    pipe = accelerated(family, "cache")
    tiny.run(pipe, family)
    try:
        clone = copy.deepcopy(pipe)
    except DiffaccelError as error:
        assert "deepcopy" in str(error)
        clone = copy.deepcopy(restore(pipe))
        put_on(pipe, family, "cache")
    result = tiny.run(clone, family)
    assert torch.equal(result, fresh(family)) or torch.equal(result, plain(family))
    restore(clone)
    assert torch.equal(tiny.run(clone, family), plain(family))
    assert torch.equal(tiny.run(pipe, family), fresh(family))


def in_threads(*jobs: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Run all jobs at once, each in a thread of its own; their results, or the first error."""
    results: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        try:
            start.wait()
            results[index] = jobs[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(jobs))]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_two_threads_on_one_pipeline(family: str) -> None:
    """Two calls at once on one accelerated pipeline each give their serial result."""
    pipe = accelerated(family, "cache")
    calls = [{"num_inference_steps": 8}, second_prompt(num_inference_steps=7)]
    for _ in range(2):
        found = in_threads(*(lambda call=call: tiny.run(pipe, family, **call) for call in calls))
        for result, call in zip(found, calls, strict=True):
            assert torch.equal(result, fresh(family, "cache", **call))


@pytest.mark.parametrize(("lever", "true_cfg"), [("cache", False), ("cache", True), ("attention", False)])
def test_threads_on_pipelines_that_share_a_transformer(lever: str, true_cfg: bool) -> None:
    """An accelerated and a plain pipeline at once on one transformer: cached stays cached, plain exact.

    Only the transformer is shared: tokenizers cannot be used by two threads, with or without us.
    """
    first, second = tiny.build("flux"), tiny.build("flux")
    second.transformer = first.transformer
    put_on(first, "flux", lever)
    mine = {"num_inference_steps": 8, "true_cfg": true_cfg}
    theirs = second_prompt(**mine)
    accelerated_result, exact_result = fresh("flux", lever, **mine), plain("flux", **theirs)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # the two threads change places often
    try:
        found = [
            in_threads(lambda: tiny.run(first, "flux", **mine), lambda: tiny.run(second, "flux", **theirs))
            for _ in range(6)
        ]
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(exact, exact_result) for _, exact in found)
    assert all(torch.equal(result, accelerated_result) for result, _ in found)
