"""Attention backends: capability, fallback, and nothing process-wide."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from diffaccel import accelerate, restore
from diffaccel.attention.backends import BACKENDS, unfit
from diffaccel.ledger.hardware import HARDWARE
from tests import tiny
from tests.models.families import table


def test_capability_table() -> None:
    flash, flex, native = (BACKENDS[n] for n in ("flash", "flex", "native"))
    assert unfit(native, HARDWARE["cpu"], "float32", 512) is None
    assert unfit(flex, HARDWARE["4090"], "bfloat16", 64) is None
    assert "cuda" in (unfit(flash, HARDWARE["cpu"], "bfloat16", 64) or "")
    assert "bfloat16" in (unfit(flash, HARDWARE["h100"], "float32", 64) or "")
    assert "512" in (unfit(flash, HARDWARE["h100"], "bfloat16", 512) or "")
    assert "flash-attn" in (unfit(flash, HARDWARE["h100"], "bfloat16", 128) or "")


@pytest.mark.parametrize("family", ["flux", "wan", "sd3", "sdxl"])  # the last two call SDPA themselves
def test_the_backend_computes_and_nothing_of_diffusers_is_moved(family: str) -> None:
    pipe = tiny.build(family)
    plain = tiny.run(pipe, family)
    before = _AttentionBackendRegistry._active_backend
    accelerate(pipe, None, attention="flex")
    flex = tiny.run(pipe, family)
    calls = pipe.acceleration.report.stats["attention.flex"]["calls"]
    assert calls["flex"] > 0 and "fallback" not in calls
    assert _AttentionBackendRegistry._active_backend is before
    assert torch.allclose(flex, plain, atol=1e-4) and not torch.equal(flex, plain)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain)


def test_auto_on_a_cpu_says_that_native_is_in_use() -> None:
    pipe = accelerate(tiny.build("flux"), None, attention="auto")
    item = pipe.acceleration.plan.item("attention.auto")
    assert item.status == "skipped" and "native" in item.reason
    restore(pipe)


def test_auto_replaces_a_users_own_choice_and_gives_it_back() -> None:
    pipe = tiny.build("flux")
    before = _AttentionBackendRegistry._active_backend
    try:
        pipe.transformer.set_attention_backend("flex")
        accelerate(pipe, None, attention="auto")
        assert pipe.acceleration.plan.item("attention.auto").status == "enabled"
        restore(pipe)
        processor = pipe.transformer.transformer_blocks[0].attn.processor
        assert processor._attention_backend == AttentionBackendName.FLEX
    finally:
        _AttentionBackendRegistry.set_active_backend(before)


def test_a_backend_that_no_longer_fits_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was made for one kind of call, the run makes another: computed as it was, said once and counted."""
    from diffaccel.attention import choice

    pipe = tiny.build("flux")
    plain = tiny.run(pipe, "flux")
    accelerate(pipe, None, attention="flex")
    monkeypatch.setattr(choice, "unfit_call", lambda *args: "the call is on another device")
    assert torch.equal(tiny.run(pipe, "flux"), plain)
    report = pipe.acceleration.report
    stats = report.stats["attention.flex"]
    assert stats["fallbacks"] == {"the call is on another device": stats["calls"]["fallback"]}
    assert [note for note in report.notes if "another device" in note] == [report.notes[0]]
    restore(pipe)


def test_compiled_blocks_keep_the_backend_to_the_pipelines_own_runs() -> None:
    """C46 in a graph: a plain pipeline on the same compiled model computes as it did, and back costs no new graph."""
    pipe = tiny.build("wan")
    twin = type(pipe)(**pipe.components)
    plain = tiny.run(twin, "wan")
    accelerate(pipe, None, attention="flex", compile=True, compile_backend="eager")
    flex = tiny.run(pipe, "wan")
    assert not torch.equal(flex, plain)
    assert torch.equal(tiny.run(twin, "wan"), plain)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(tiny.run(pipe, "wan"), flex)
        assert torch.equal(tiny.run(twin, "wan"), plain)
    restore(pipe)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", ["wan", "sd3"])
def test_calls_in_compiled_blocks_are_counted(family: str, backend: str) -> None:
    """As many as without compiling, in whole graphs that are made once; a neighbour's calls are not among them."""
    pipe = table.build(family)
    accelerate(pipe, None, attention="flex")
    table.run(pipe, family)
    stats = pipe.acceleration.report.stats["attention.flex"]
    assert stats["calls"]["flex"] > 0
    twin = type(pipe)(**pipe.components)
    accelerate(pipe, None, attention="flex", compile=True, compile_backend=backend, compile_fullgraph=True)
    torch._dynamo.reset()
    for again in range(2):
        with torch._dynamo.config.patch(error_on_recompile=bool(again)):
            first = table.run(pipe, family)[0]
        assert pipe.acceleration.report.stats["attention.flex"] == stats
        assert pipe.acceleration.report.stats["compile"]["graph_breaks"] == 0
    table.run(twin, family)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(table.run(pipe, family)[0], first)
    assert pipe.acceleration.report.stats["attention.flex"] == stats
    restore(pipe)


def test_skipped_blocks_are_not_counted() -> None:
    """With a cache, a compiled block that is skipped makes no call."""
    pipe = accelerate(tiny.build("flux"), None, attention="flex", compile=True, compile_backend="eager",
                      cache="first_block", cache_threshold=1e9, cache_min_steps=0, cache_last_steps=0)  # fmt: skip
    tiny.run(pipe, "flux")
    blocks = len(pipe.transformer.transformer_blocks) + len(pipe.transformer.single_transformer_blocks)
    report = pipe.acceleration.report
    computed = sum(step.computed for step in report.steps)
    assert 0 < computed < len(report.steps)
    calls = report.stats["attention.flex"]["calls"]["flex"]
    assert calls == computed * blocks + (len(report.steps) - computed), "of a reused step, the first block alone"
    restore(pipe)
