"""Invariant 1: after restore, nothing of an accelerator is left, and everything of the user's is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Backends

from diffaccel import accelerate, attach, restore
from tests import fingerprint, tiny

from .levers import (
    ATTENTION,
    BACKEND,
    CACHES,
    DISPATCHED,
    LEVERS,
    THRESHOLD,
    Stop,
    accelerated,
    at_step,
    cache_options,
    counted,
    put_on,
    raise_at,
)


def assert_no_forward(pipe: Any) -> None:
    """No module keeps an instance-level forward."""
    for name, component in tiny.component_modules(pipe):
        left = [path for path, module in component.named_modules() if "forward" in vars(module)]
        assert not left, f"{name}: forward left in vars of {left}"


def hook_names(pipe: Any) -> dict[str, list[str]]:
    """The names of all hooks in diffusers' registries, by module."""
    found = {}
    for path, module in tiny.denoiser(pipe).named_modules():
        order = getattr(getattr(module, "_diffusers_hook", None), "_hook_order", [])
        if order:
            found[path] = list(order)
    return found


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_restore_leaves_no_trace(family: str, lever: str) -> None:
    """Attach, run, restore: same fingerprint, same bits; a second restore is a no-op."""
    pipe = tiny.build(family)
    reference = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    put_on(pipe, family, lever)
    tiny.run(pipe, family)
    assert restore(pipe) is pipe
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert_no_forward(pipe)
    assert torch.equal(tiny.run(pipe, family), reference)
    assert restore(pipe) is pipe
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_restore_without_a_run(family: str) -> None:
    """A pipeline that never ran is as new after attach and restore; restore needs no attach."""
    pipe = tiny.build(family)
    before = fingerprint.snapshot_pipe(pipe)
    assert restore(pipe) is pipe
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    put_on(pipe, family, "both")
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("error", [Stop("stop"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_restore_after_a_broken_run(family: str, error: BaseException) -> None:
    """A run that ended in an exception leaves as little as one that ended well."""
    pipe = tiny.build(family)
    reference = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    put_on(pipe, family, "both")
    with pytest.raises(type(error)):
        tiny.run(pipe, family, callback_on_step_end=raise_at(3, error))
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, family), reference)


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_handle_restores_too(family: str) -> None:
    """pipe.acceleration.restore() is restore(pipe), also for a handle kept aside."""
    pipe = tiny.build(family)
    reference = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    handle = put_on(pipe, family, "both").acceleration
    tiny.run(pipe, family)
    handle.restore()
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, family), reference)


@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_verbs_undo_each_other(family: str) -> None:
    """enable, reconfigure, disable by verbs: each returns the pipe, and after disable the bits are plain."""
    pipe = tiny.build(family)
    reference = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    assert attach(pipe) is pipe
    attached = hook_names(pipe)
    options = {"min_steps": 0, "last_steps": 0}
    assert pipe.enable_first_block_cache(threshold=1e9, **options) is pipe
    assert not torch.equal(tiny.run(pipe, family), reference)
    assert pipe.enable_first_block_cache(threshold=THRESHOLD[family], **options) is pipe
    tiny.run(pipe, family)
    if family in ATTENTION:
        assert pipe.enable_attention(BACKEND) is pipe
        tiny.run(pipe, family)
    assert pipe.disable_cache() is pipe
    if family in ATTENTION:
        assert pipe.disable_attention() is pipe
    assert torch.equal(tiny.run(pipe, family), reference)
    assert hook_names(pipe) == attached
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("family", DISPATCHED)
def test_the_users_attention_backend_survives(family: str) -> None:
    """A backend set on the model before (which moves the process-wide default too) is there afterwards."""
    pipe = tiny.build(family)
    pipe.transformer.set_attention_backend(BACKEND)
    reference = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, preset=None, attention="native", **cache_options(family))
    tiny.run(pipe, family)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, family), reference)


@pytest.mark.parametrize("family", ATTENTION)
def test_the_process_wide_backend_never_moves(family: str) -> None:
    """Not at attach, not during a run, not at restore."""
    default = Backends._active_backend
    seen = []
    pipe = accelerated(family, "both")
    seen.append(Backends._active_backend)
    tiny.run(pipe, family, callback_on_step_end=at_step(2, lambda _: seen.append(Backends._active_backend)))
    seen.append(Backends._active_backend)
    restore(pipe)
    seen.append(Backends._active_backend)
    assert seen == [default] * 4


class Note(ModelHook):
    """A user's own diffusers hook that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Count."""
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("family", CACHES)
def test_the_users_hooks_survive(family: str) -> None:
    """A registry hook, a torch hook and an instance-level forward of the user's act during and after."""
    pipe = tiny.build(family)
    first, second = tiny.blocks(pipe.transformer)[:2]
    note = Note()
    HookRegistry.check_if_exists_or_initialize(first).register_hook(note, "user")
    calls: list[int] = []
    plain_forward: Callable[..., Any] = second.forward

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain_forward(*args, **kwargs)

    second.forward = types.MethodType(forward, second)
    with counted(first) as torch_calls:
        reference = tiny.run(pipe, family)
        per_run = note.calls
        assert per_run == len(calls) == torch_calls[0] > 0
        before = fingerprint.snapshot_pipe(pipe)
        put_on(pipe, family, "cache")
        tiny.run(pipe, family)
        assert note.calls == torch_calls[0] == 2 * per_run, "the first block runs in every step"
        assert per_run < len(calls) < 2 * per_run, "the second block is skipped in some steps"
        restore(pipe)
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
        assert torch.equal(tiny.run(pipe, family), reference)
        assert note.calls == torch_calls[0] == 3 * per_run


@pytest.mark.parametrize("family", CACHES)
def test_a_hook_the_user_adds_later_survives(family: str) -> None:
    """A registry hook that came on top of ours stays in the chain after restore."""
    pipe = accelerated(family, "cache")
    block = tiny.blocks(pipe.transformer)[0]
    note = Note()
    HookRegistry.check_if_exists_or_initialize(block).register_hook(note, "user")
    tiny.run(pipe, family)
    restore(pipe)
    assert block._diffusers_hook._hook_order == ["user"]
    note.calls = 0
    with counted(tiny.blocks(pipe.transformer)[1]) as calls:
        assert torch.equal(tiny.run(pipe, family), tiny.run(tiny.build(family), family))
    assert note.calls == calls[0] > 0


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_native_cache_works_after_restore(family: str) -> None:
    """diffusers' own first-block cache gives what it gives on a pipeline never touched, and goes away."""
    config = FirstBlockCacheConfig(threshold=THRESHOLD[family])
    untouched = tiny.build(family)
    reference = tiny.run(untouched, family)
    untouched.transformer.enable_cache(config)
    native = tiny.run(untouched, family)
    assert not torch.equal(native, reference)

    pipe = accelerated(family, "both")
    tiny.run(pipe, family)
    restore(pipe)
    pipe.transformer.enable_cache(config)
    assert torch.equal(tiny.run(pipe, family), native)
    pipe.transformer.disable_cache()
    assert torch.equal(tiny.run(pipe, family), reference)


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_attach_and_restore_inside_inference_mode(family: str) -> None:
    """Attaching under inference_mode makes no inference tensors: the weights can be trained afterwards."""
    pipe = tiny.build(family)
    reference = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    with torch.inference_mode():
        put_on(pipe, family, "both")
        inside = tiny.run(pipe, family)
    assert torch.equal(tiny.run(pipe, family), inside)
    with torch.inference_mode():
        restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, family), reference)
    assert not any(parameter.is_inference() for parameter in tiny.denoiser(pipe).parameters())


def test_one_shared_subclass_per_class() -> None:
    """Two accelerated pipelines have the same class; its name and module are the original's."""
    first, second = accelerated("flux", "cache"), accelerated("flux", "attach")
    original = type(tiny.build("flux"))
    assert type(first) is type(second) is not original
    assert type(first).__name__ == original.__name__
    assert type(first).__qualname__ == original.__qualname__
    assert type(first).__module__ == original.__module__
