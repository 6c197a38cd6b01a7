"""Invariant 6: min_steps and last_steps guard every cache; below them it stands down and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach
from tests import tiny

from .levers import CACHE_ITEM, CACHES, REUSE_ALL, accelerated, item, pattern, plain


def branches(family: str) -> tuple[str | None, ...]:
    """The branches to look at one by one."""
    return ("cond", "uncond") if family == "wan" else (None,)


def reasons(pipe: Any) -> str:
    """Everything the plan and the last report say in words about the cache."""
    return " ".join([item(pipe.acceleration.plan, CACHE_ITEM).reason, *pipe.acceleration.report.notes]).lower()


@pytest.mark.parametrize("family", CACHES)
def test_six_steps_are_too_few_by_default(family: str) -> None:
    """The default guard of nine steps: six steps are computed in full, with the reason given; ten are not."""
    pipe = accelerate(tiny.build(family), preset=None, cache="first_block", cache_threshold=REUSE_ALL)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    assert all(pattern(pipe))
    assert "9" in reasons(pipe) and "step" in reasons(pipe)
    tiny.run(pipe, family, num_inference_steps=10)
    assert False in pattern(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family)), "the guard is asked anew in each run"


@pytest.mark.parametrize(("min_steps", "acts"), [(0, True), (6, True), (7, False)])
@pytest.mark.parametrize("family", CACHES)
def test_min_steps(family: str, min_steps: int, acts: bool) -> None:
    """Exactly below min_steps the cache stands down."""
    pipe = accelerated(family, "cache", cache_threshold=REUSE_ALL, cache_min_steps=min_steps)
    result = tiny.run(pipe, family)
    assert (False in pattern(pipe)) is acts
    assert torch.equal(result, plain(family)) is not acts


@pytest.mark.parametrize("last_steps", [0, 1, 3, 20])
@pytest.mark.parametrize("family", CACHES)
def test_last_steps(family: str, last_steps: int) -> None:
    """The last steps are computed in every branch, all others but the first are reused."""
    pipe = accelerated(family, "cache", cache_threshold=REUSE_ALL, cache_last_steps=last_steps)
    result = tiny.run(pipe, family)
    expected = [step == 0 or step >= tiny.STEPS - last_steps for step in range(tiny.STEPS)]
    for branch in branches(family):
        assert pattern(pipe, branch) == expected
    assert torch.equal(result, plain(family)) is all(expected)


@pytest.mark.parametrize("family", CACHES)
def test_the_last_step_is_computed_by_default(family: str) -> None:
    """By default the last step of every branch is a computed one; the verb has the same defaults."""
    for verb in (False, True):
        pipe = attach(tiny.build(family))
        if verb:
            pipe.enable_first_block_cache(threshold=REUSE_ALL)
        else:
            accelerate(pipe, preset=None, cache="first_block", cache_threshold=REUSE_ALL)
        tiny.run(pipe, family, num_inference_steps=10)
        for branch in branches(family):
            assert pattern(pipe, branch) == [True, *[False] * 8, True]


@pytest.mark.parametrize("family", CACHES)
def test_one_step(family: str) -> None:
    """A run of a single step has nothing to reuse."""
    pipe = accelerated(family, "cache", cache_threshold=REUSE_ALL)
    assert torch.equal(tiny.run(pipe, family, num_inference_steps=1), plain(family, num_inference_steps=1))
