"""The fingerprint sees every kind of trace an accelerator could leave, and nothing where nothing was left."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook

from tests import fingerprint, tiny


def _subclass(pipe: Any) -> None:
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), {})


def _forward(pipe: Any) -> None:
    block = tiny.blocks(pipe.transformer)[0]
    block.forward = types.MethodType(type(block).forward, block)


def _hook(pipe: Any) -> None:
    HookRegistry.check_if_exists_or_initialize(tiny.blocks(pipe.transformer)[1]).register_hook(ModelHook(), "toy")


def _order(pipe: Any) -> None:
    modules = pipe.transformer._modules
    modules[next(iter(modules))] = modules.pop(next(iter(modules)))


def _processor(pipe: Any) -> None:
    attention = tiny.blocks(pipe.transformer)[0].attn
    attention.processor = type(attention.processor)()


def _global_backend(pipe: Any) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    _AttentionBackendRegistry._active_backend = AttentionBackendName.FLEX


TRACES: dict[str, Callable[[Any], Any]] = {
    "another class": _subclass,
    "an attribute of the pipeline": lambda pipe: setattr(pipe, "_left_over", 1),
    "an attribute of a module": lambda pipe: setattr(pipe.vae, "_left_over", 1),
    "a replaced component": lambda pipe: setattr(pipe, "transformer", tiny.build("flux").transformer),
    "a forward in vars(module)": _forward,
    "a hook in a registry": _hook,
    "a torch forward hook": lambda pipe: pipe.transformer.register_forward_hook(lambda *_: None),
    "another order of modules": _order,
    "another processor": _processor,
    "a processor's backend": lambda pipe: setattr(
        tiny.blocks(pipe.transformer)[0].attn.processor, "_attention_backend", "flex"
    ),
    "the process-wide backend": _global_backend,
    "an attribute of the scheduler": lambda pipe: setattr(pipe.scheduler, "_left_over", 1),
    "a replaced parameter": lambda pipe: setattr(
        pipe.transformer.x_embedder, "bias", torch.nn.Parameter(pipe.transformer.x_embedder.bias.detach())
    ),
}


@pytest.mark.parametrize("trace", TRACES)
def test_fingerprint_sees(trace: str) -> None:
    """Each kind of trace shows, and only it."""
    pipe = tiny.build("flux")
    tiny.run(pipe, "flux")
    before = fingerprint.snapshot_pipe(pipe)
    TRACES[trace](pipe)
    with pytest.raises(AssertionError, match="traces left"):
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("name", ["pipeline class", "block class", "registry class", "dispatch function"])
def test_fingerprint_sees_class_patches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched class or module function shows."""
    pipe = tiny.build("flux")
    tiny.run(pipe, "flux")
    before = fingerprint.snapshot_pipe(pipe)
    if name == "pipeline class":
        monkeypatch.setattr(type(pipe), "__call__", lambda *_: None)
    elif name == "block class":
        monkeypatch.setattr(type(pipe.transformer.transformer_blocks[0]), "forward", lambda *_: None)
    elif name == "registry class":
        monkeypatch.setattr(HookRegistry, "remove_hook", lambda *_: None)
    else:
        monkeypatch.setattr("diffusers.models.transformers.transformer_flux.dispatch_attention_fn", lambda *_: None)
    with pytest.raises(AssertionError, match="traces left"):
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.EXTRAS])
def test_fingerprint_of_an_untouched_pipeline_is_stable(family: str) -> None:
    """Plain runs, an empty registry and diffusers' own cache switched on and off leave nothing."""
    pipe = tiny.build(family)
    first = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    assert torch.equal(tiny.run(pipe, family), first)
    assert not torch.equal(tiny.run(pipe, family, prompt=tiny.PROMPTS[1]), first)
    assert torch.isfinite(first).all()
    HookRegistry.check_if_exists_or_initialize(tiny.denoiser(pipe))
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("family", tiny.TRANSFORMERS)
def test_every_block_matters(family: str) -> None:
    """Halving the weights of any block changes the picture: a skipped block cannot hide."""
    pipe = tiny.build(family)
    reference = tiny.run(pipe, family)
    for block in tiny.blocks(pipe.transformer):
        with torch.no_grad():
            saved = [parameter.clone() for parameter in block.parameters()]
            for parameter in block.parameters():
                parameter.mul_(0.5)
            changed = tiny.run(pipe, family)
            for parameter, old in zip(block.parameters(), saved, strict=True):
                parameter.copy_(old)
        assert (changed - reference).abs().max() > 1e-3
    assert torch.equal(tiny.run(pipe, family), reference)
