"""Quantization with cache, attention and compiled blocks: in any order, twice in a row, undone in any order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from diffaccel import attach, restore
from tests import tiny
from tests.fingerprint import differences, snapshot_pipe

FAMILIES = {"flux": "fp8", "wan": "int8", "sd3": "fp8"}
ORDERS = list(itertools.permutations(("quantization", "cache", "attention")))


def _on(pipe: Any, what: str, family: str) -> None:
    if what == "quantization":
        if FAMILIES[family] == "fp8":
            pipe.enable_fp8()
        else:
            pipe.enable_int8(scheme="weight_only")
    elif what == "cache":
        pipe.enable_first_block_cache(threshold=1e9, min_steps=0, last_steps=0)
    else:
        pipe.enable_attention("native")


def _off(pipe: Any, what: str) -> None:
    getattr(pipe, f"disable_{what}")()


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest) -> tuple[str, Any, torch.Tensor]:
    """(family, a pipeline that every test gives back as it was, its plain output)."""
    pipe = tiny.build(request.param)
    return request.param, pipe, tiny.run(pipe, request.param)


def test_every_order_of_the_calls_and_of_their_undo(base: tuple[str, Any, torch.Tensor]) -> None:
    family, pipe, plain = base
    parts = ("quantization", "cache", "attention") if family != "sd3" else ("quantization", "cache")
    before = snapshot_pipe(pipe)
    attach(pipe)
    _on(pipe, "quantization", family)
    alone = tiny.run(pipe, family)
    _on(pipe, "cache", family)
    both = tiny.run(pipe, family)
    assert not torch.equal(alone, plain) and not torch.equal(both, alone)
    restore(pipe)
    for order, undo in zip(itertools.permutations(parts), reversed(list(itertools.permutations(parts))), strict=True):
        attach(pipe)
        for what in (*order, *order):  # twice in a row
            _on(pipe, what, family)
        assert torch.equal(tiny.run(pipe, family), both), f"{order} is another picture"
        for what in undo[:-1]:
            _off(pipe, what)
        left = tiny.run(pipe, family)
        expected = {"quantization": alone, "attention": plain}.get(undo[-1])
        assert expected is None or torch.equal(left, expected), f"after {undo[:-1]} is undone"
        _off(pipe, undo[-1])
        assert torch.equal(tiny.run(pipe, family), plain)
        restore(pipe)
    assert differences(before, snapshot_pipe(pipe)) == []


@pytest.mark.parametrize("first", ("quantization", "compile"))
def test_compiled_blocks_in_either_order(base: tuple[str, Any, torch.Tensor], first: str) -> None:
    family, pipe, plain = base
    if family != "flux":
        pytest.skip("one family is enough for the compiler")
    torch._dynamo.reset()
    attach(pipe)
    _on(pipe, "quantization", family)
    eager = tiny.run(pipe, family, num_inference_steps=2)
    pipe.disable_quantization()
    if first == "compile":
        pipe.enable_compile(backend="eager", fullgraph=True)
        _on(pipe, "quantization", family)
    else:
        _on(pipe, "quantization", family)
        pipe.enable_compile(backend="eager", fullgraph=True)
    assert torch.equal(tiny.run(pipe, family, num_inference_steps=2), eager)
    assert pipe.acceleration.report.stats["compile"]["graph_breaks"] == 0
    again = tiny.run(pipe, family, num_inference_steps=2)
    assert torch.equal(again, eager) and pipe.acceleration.report.stats["compile"]["graphs_compiled"] == 0
    _off(pipe, first)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain)
