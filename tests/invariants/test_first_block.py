"""The first-block cache against an independent one written by hand, and against diffusers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from tests import tiny

from .levers import REUSE_ALL, THRESHOLD, accelerated, counted, inner, pattern, trace


class ByHand:
    """First-block caching by replaced block forwards, one state per branch; nothing of diffaccel is used.

    The residual of the first block is compared with that of the last computed step; below the threshold the
    change that all later blocks made in that step is added to the first block's output.
    """

    def __init__(self, pipe: Any, family: str, threshold: float, branches: int) -> None:
        self.family, self.threshold, self.branches = family, threshold, branches
        self.states: list[dict[str, Any]] = [{} for _ in range(branches)]
        self.computed: list[list[bool]] = [[] for _ in range(branches)]
        self.calls = 0
        first, *others, last = tiny.blocks(pipe.transformer)
        first.forward = self._first(first.forward)
        for block in others:
            block.forward = self._other(block.forward)
        last.forward = self._last(last.forward)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Image and text stream of a block's arguments."""
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if self.family == "wan":
            return hidden, None
        return hidden, kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[1]

    def _join(self, hidden: torch.Tensor, text: Any) -> Any:
        """A block's result of both streams."""
        return hidden if self.family == "wan" else (text, hidden)

    def _parts(self, result: Any) -> tuple[torch.Tensor, Any]:
        return (result, None) if self.family == "wan" else (result[1], result[0])

    def _first(self, forward: Any) -> Any:
        def first(*args: Any, **kwargs: Any) -> Any:
            state = self.states[self.calls % self.branches]
            result = forward(*args, **kwargs)
            hidden = self._parts(result)[0]
            residual = hidden - self._split(args, kwargs)[0]
            previous = state.get("residual")
            compute = True
            if previous is not None:
                change = (residual - previous).abs().mean() / previous.abs().mean()
                compute = bool(change >= self.threshold)
            if compute:
                state["residual"] = residual
            state["compute"], state["head"] = compute, hidden
            self.computed[self.calls % self.branches].append(compute)
            return result

        return first

    def _other(self, forward: Any) -> Any:
        def other(*args: Any, **kwargs: Any) -> Any:
            if self.states[self.calls % self.branches]["compute"]:
                return forward(*args, **kwargs)
            return self._join(*self._split(args, kwargs))

        return other

    def _last(self, forward: Any) -> Any:
        def last(*args: Any, **kwargs: Any) -> Any:
            state = self.states[self.calls % self.branches]
            self.calls += 1
            if state["compute"]:
                result = forward(*args, **kwargs)
                hidden, text = self._parts(result)
                state["tail"] = hidden - state["head"]
                state["text"] = text
                return result
            # No family reads the text stream after its last block.
            return self._join(state["head"] + state["tail"], state["text"])

        return last


CASES = [
    ("flux", {}, 1),
    ("flux", {"true_cfg": True}, 2),
    ("wan", {}, 2),
    ("wan", {"guidance_scale": 1.0}, 1),
    ("sd3", {}, 1),
    ("sd3", {"prompt": [*tiny.PROMPTS[:2]], "num_images_per_prompt": 2}, 1),
]


@pytest.mark.parametrize("scale", [0.6, 1.0, 1.5])
@pytest.mark.parametrize(("family", "call", "branches"), CASES)
def test_against_one_written_by_hand(family: str, call: dict[str, Any], branches: int, scale: float) -> None:
    """Ten steps at three thresholds: the same hits in every branch, the same picture to 1e-6."""
    threshold = THRESHOLD[family] * scale
    pipe = tiny.build(family)
    reference = ByHand(pipe, family, threshold, branches)
    expected = tiny.run(pipe, family, num_inference_steps=10, **call)

    ours = accelerated(family, "cache", cache_threshold=threshold)
    result = tiny.run(ours, family, num_inference_steps=10, **call)
    names = list(dict.fromkeys(branch for _, branch, _ in trace(ours)))
    assert len(names) == branches
    assert [pattern(ours, name) for name in names] == reference.computed
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


def test_the_cases_hold_hits_and_misses() -> None:
    """The comparison above is not about trivial patterns: they differ between thresholds."""
    for family in ("flux", "wan", "sd3"):
        seen = set()
        for scale in (0.6, 1.0, 1.5):
            pipe = tiny.build(family)
            reference = ByHand(pipe, family, THRESHOLD[family] * scale, 2 if family == "wan" else 1)
            tiny.run(pipe, family, num_inference_steps=10)
            seen.add(tuple(reference.computed[0]))
        assert len(seen) >= 2 and any(False in found[1:] and True in found[1:] for found in seen), family


@pytest.mark.parametrize("scale", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_against_diffusers(family: str, scale: float) -> None:
    """diffusers' own first-block cache where it works: same number of computed calls, same picture."""
    threshold = THRESHOLD[family] * scale
    native = tiny.build(family)
    native.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    with counted(inner(native)) as theirs:
        expected = tiny.run(native, family, num_inference_steps=10)
    pipe = accelerated(family, "cache", cache_threshold=threshold)
    with counted(inner(pipe)) as ours:
        result = tiny.run(pipe, family, num_inference_steps=10)
    assert ours[0] == theirs[0] == pattern(pipe).count(True)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_what_a_reused_step_computes(family: str) -> None:
    """At an infinite threshold the first block runs in every step and every other block once per branch."""
    pipe = accelerated(family, "cache", cache_threshold=REUSE_ALL)
    calls = {}

    def note(index: int) -> Any:
        def hook(*_: Any) -> None:
            calls[index] = calls.get(index, 0) + 1

        return hook

    handles = [
        (block.attn1 if hasattr(block, "attn1") else block.attn).register_forward_hook(note(index))
        for index, block in enumerate(tiny.blocks(pipe.transformer))
    ]
    tiny.run(pipe, family)
    for handle in handles:
        handle.remove()
    branches = 2 if family == "wan" else 1
    count = len(handles)
    assert calls == {0: branches * tiny.STEPS} | {index: branches for index in range(1, count)}
    assert pipe.acceleration.report.hit_rate == pytest.approx((tiny.STEPS - 1) / tiny.STEPS)
