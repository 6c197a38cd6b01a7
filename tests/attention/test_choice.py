"""Attention backends: capability, fallback, and nothing process-wide."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from diffaccel import accelerate, restore
from diffaccel.attention.backends import BACKENDS, unfit
from diffaccel.ledger.hardware import HARDWARE
from tests import tiny


def test_capability_table() -> None:
    flash, flex, native = (BACKENDS[n] for n in ("flash", "flex", "native"))
    assert unfit(native, HARDWARE["cpu"], "float32", 512) is None
    assert unfit(flex, HARDWARE["4090"], "bfloat16", 64) is None
    assert "cuda" in (unfit(flash, HARDWARE["cpu"], "bfloat16", 64) or "")
    assert "bfloat16" in (unfit(flash, HARDWARE["h100"], "float32", 64) or "")
    assert "512" in (unfit(flash, HARDWARE["h100"], "bfloat16", 512) or "")
    assert "flash-attn" in (unfit(flash, HARDWARE["h100"], "bfloat16", 128) or "")


def test_the_backend_is_in_force_during_the_call_only() -> None:
    pipe = tiny.build("flux")
    plain = tiny.output(pipe(**tiny.call_kwargs("flux")))
    before = _AttentionBackendRegistry._active_backend
    processors = [m.processor for m in pipe.transformer.modules() if hasattr(m, "processor")]
    seen: set[object] = set()
    watch = pipe.transformer.transformer_blocks[0].attn.register_forward_pre_hook(
        lambda module, args: seen.add(module.processor._attention_backend)
    )
    accelerate(pipe, None, attention="flex")
    flex = tiny.output(pipe(**tiny.call_kwargs("flux")))
    assert seen == {AttentionBackendName.FLEX}
    assert all(p._attention_backend is None for p in processors), "put back after each call"
    assert _AttentionBackendRegistry._active_backend is before
    assert torch.allclose(flex, plain, atol=1e-4) and pipe.acceleration.report.stats["attention.flex"]
    restore(pipe)
    seen.clear()
    assert torch.equal(tiny.output(pipe(**tiny.call_kwargs("flux"))), plain)
    assert seen == {None}
    watch.remove()


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


def test_a_backend_that_no_longer_fits_stands_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was made for one dtype, the run has another: computed as it was, and said."""
    from diffaccel.attention import choice

    pipe = tiny.build("flux")
    plain = tiny.output(pipe(**tiny.call_kwargs("flux")))
    accelerate(pipe, None, attention="flex")
    monkeypatch.setattr(choice, "unfit", lambda *args: "the model is on another device")
    assert torch.equal(tiny.output(pipe(**tiny.call_kwargs("flux"))), plain)
    item = pipe.acceleration.plan.item("attention.flex")
    assert "stood down: the model is on another device" in item.reason
    restore(pipe)
