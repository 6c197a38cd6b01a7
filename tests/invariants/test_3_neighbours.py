"""Invariant 3, between pipelines: others of the class, on the same transformer, copies, threads."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline

from diffaccel import restore
from diffaccel.errors import DiffaccelError, IncompatibleError
from tests import fingerprint, tiny

from .levers import (
    accelerated,
    at_step,
    fresh,
    plain,
    put_on,
    second_prompt,
)


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
    before = fingerprint.snapshot_pipe(second)
    try:
        put_on(second, "flux_img2img", "cache")
    except IncompatibleError as error:
        assert "transformer" in str(error)
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(second))
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
