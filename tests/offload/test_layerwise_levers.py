"""Layerwise offload under caches, with compile, casting and quantized weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach, restore
from tests import tiny
from tests.invariants.levers import Stop, cache_options, fresh, pattern, plain, raise_at
from tests.offload.offloads import blocks_of, files, offloaded, stats


@pytest.mark.parametrize("order", ["offload first", "cache first"])
@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_a_skipped_block_is_never_fetched(family: str, order: str, tmp_path: Path) -> None:
    """First-block cache, enabled before or after: a reused call moves no block but the first, which may stay."""
    pipe = attach(tiny.build(family))

    def offload() -> None:
        pipe.enable_layerwise_offload(resident_layers=1, store="disk", folder=str(tmp_path))

    def cache() -> None:
        options = {k.removeprefix("cache_"): v for k, v in cache_options(family).items() if k != "cache"}
        pipe.enable_first_block_cache(**options)

    for enable in (offload, cache) if order == "offload first" else (cache, offload):
        enable()
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    ran = pattern(pipe)
    count = len(blocks_of(pipe))
    assert 0 < ran.count(False) < len(ran)
    assert stats(pipe)["blocks_moved"] == count * ran.count(True) + ran.count(False)


@pytest.mark.parametrize("cache", ["schedule", "taylorseer", "dbcache", "teacache"])
def test_half_the_hits_move_half_the_bytes(cache: str, tmp_path: Path) -> None:
    """With the first block resident, bytes go with the calls that are computed."""
    guards = {"cache_min_steps": 0, "cache_last_steps": 0}
    options: dict[str, Any] = {
        "schedule": {"cache_steps": "101010"},
        "taylorseer": {"cache_interval": 2, "cache_first_enhance": 1},
        "dbcache": {"cache_threshold": 1e9, "cache_front_blocks": 1, "cache_back_blocks": 0, "cache_warmup_steps": 1},
        "teacache": {"cache_threshold": 1e9, "cache_coefficients": (0.0, 0.0)},
    }[cache]
    pipe = tiny.build("flux")
    offloaded(pipe, tmp_path, resident_layers=2)
    tiny.run(pipe, "flux")
    whole = stats(pipe)["bytes_moved"]
    reference = accelerate(tiny.build("flux"), preset=None, cache=cache, **guards, **options)
    expected = tiny.run(reference, "flux")
    offloaded(pipe, tmp_path, resident_layers=2, cache=cache, **guards, **options)
    assert torch.equal(tiny.run(pipe, "flux"), expected)
    ran = pattern(pipe)
    assert ran.count(False) > 0 and stats(pipe)["bytes_moved"] * len(ran) == whole * ran.count(True)


@pytest.mark.parametrize(
    ("schedule", "step", "moved"),
    [
        (None, 0, 4 + 2),  # nothing is on: two blocks of the next call are on their way
        ("101010", 0, 4),  # the next step is known to be reused
        ("101010", 1, 4 + 2),  # the step after is known to be computed
        ("101011", 5, 4 * 4),  # there is no step after this one
    ],
)
def test_what_is_fetched_for_the_next_step(schedule: str | None, step: int, moved: int, tmp_path: Path) -> None:
    """A run that stops at the end of a step has moved what its calls needed, and what is sure to be needed next."""
    guards = {"cache_min_steps": 0, "cache_last_steps": 0}
    more = {} if schedule is None else {"cache": "schedule", "cache_steps": schedule, **guards}
    pipe = offloaded(tiny.build("flux"), tmp_path, **more)
    with pytest.raises(Stop):
        tiny.run(pipe, "flux", callback_on_step_end=raise_at(step, Stop("stop")))
    assert stats(pipe)["blocks_moved"] == moved


def test_compiled_blocks(tmp_path: Path) -> None:
    """Regional compile: whole graphs, none compiled again in the second run, same bits as compile alone."""
    reference = accelerate(tiny.build("flux"), preset=None, compile=True, compile_backend="eager")
    expected = tiny.run(reference, "flux")
    pipe = tiny.build("flux")
    offloaded(pipe, tmp_path, compile=True, compile_backend="eager", compile_fullgraph=True)
    assert torch.equal(tiny.run(pipe, "flux"), expected)
    assert pipe.acceleration.report.stats["compile"]["graph_breaks"] == 0
    assert torch.equal(tiny.run(pipe, "flux"), expected)
    assert pipe.acceleration.report.stats["compile"]["graphs_compiled"] == 0
    assert stats(pipe)["blocks_moved"] == 4 * tiny.STEPS
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


def test_layerwise_casting(tmp_path: Path) -> None:
    """diffusers' storage in 8 bits, cast up around each layer, on top of weights that come and go."""
    outputs = []
    for offload in (False, True):
        pipe = tiny.build("flux")
        pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        if offload:
            offloaded(pipe, tmp_path)
        outputs.append([tiny.run(pipe, "flux") for _ in range(2)])
        if offload:
            assert stats(pipe)["blocks_moved"] == 4 * tiny.STEPS
            restore(pipe)
            outputs[-1].append(tiny.run(pipe, "flux"))
    assert all(torch.equal(outputs[0][0], other) for other in (*outputs[0], *outputs[1]))


@pytest.mark.parametrize("kind", ["torchao", "quanto"])
def test_quantized_weights(kind: str, tmp_path: Path) -> None:
    """Weights that are tensor subclasses keep their wrapper; what is inside moves."""
    pipe = tiny.build("wan")
    if kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(pipe.transformer.blocks, quantization.Int8WeightOnlyConfig())
    else:
        quanto = pytest.importorskip("optimum.quanto")
        quanto.quantize(pipe.transformer.blocks, weights=quanto.qint8)
        quanto.freeze(pipe.transformer.blocks)
    reference = tiny.run(pipe, "wan")
    weights = [block.attn1.to_q.weight for block in pipe.transformer.blocks]
    assert all(type(w) not in (torch.Tensor, torch.nn.Parameter) for w in weights)
    offloaded(pipe, tmp_path)
    assert torch.equal(tiny.run(pipe, "wan"), reference) and not torch.equal(reference, plain("wan"))
    assert all(block.attn1.to_q.weight is w for block, w in zip(pipe.transformer.blocks, weights, strict=True))
    stored = sum(os.path.getsize(file) for file in files(tmp_path))
    assert stored < 4 * sum(w.numel() for w in weights) * 50
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "wan"), reference)
