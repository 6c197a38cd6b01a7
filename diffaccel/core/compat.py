"""Every private name of diffusers and PyTorch that diffaccel leans on, in one place.

`drift()` says which of them the installed versions no longer have; a test keeps it empty.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from diffusers.hooks.hooks import (
    HookFunctionReference,
    HookRegistry,
    ModelHook,
    StateManager,
)
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
)
from diffusers.models.attention_dispatch import dispatch_attention_fn as dispatch_attention
from diffusers.utils.torch_utils import unwrap_module

# set_eval_frame(None) keeps torch.compile out of everything that is called until the value it returned is set again.
from torch._C._dynamo.eval_frame import set_eval_frame

__all__ = [
    "AttentionBackendName",
    "HookFunctionReference",
    "HookRegistry",
    "ModelHook",
    "StateManager",
    "attention_backends",
    "compile_backends",
    "compile_counts",
    "dispatch_attention",
    "drift",
    "eager",
    "host_edit",
    "leaves",
    "native_cache",
    "no_duck_shape",
    "num_timesteps",
    "set_eval_frame",
    "unwrap_module",
]

REGISTRY = "_diffusers_hook"  # attribute of a module that holds its HookRegistry
COMPILED = "_compiled_call_impl"  # set by nn.Module.compile()
OLD_FORWARD = "_old_forward"  # set by accelerate's add_hook_to_module

# Hook names of diffusers' own step caches (their `apply_*` functions leave no config behind).
NATIVE_CACHE_HOOKS = (
    "fbc_leader_block_hook",
    "fbc_block_hook",
    "mag_cache_leader_block_hook",
    "mag_cache_block_hook",
    "sea_cache_root",
    "sea_cache_leader_block",
    "taylorseer_cache",
    "pyramid_attention_broadcast",
    "faster_cache_denoiser",
    "faster_cache_block",
    "text_kv_cache_transformer",
)

F = TypeVar("F", bound=Callable[..., Any])


def host_edit(fn: F) -> F:
    """Run `fn` outside inference mode, so that what it creates stays usable in later, ordinary calls."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False):
            return fn(*args, **kwargs)

    return cast(F, wrapper)


def eager(fn: F) -> F:
    """Keep `fn` out of compiled graphs, at no cost where nothing is compiled; what it calls is not kept out.

    `torch.compiler.disable` does more with a wrapper of several Python calls per call; see `set_eval_frame`.
    """
    from torch._dynamo.decorators import skip

    return cast(F, skip(fn))


def native_cache(module: torch.nn.Module) -> str | None:
    """The name of a diffusers step cache that is on in `module`, or None."""
    config = getattr(module, "_cache_config", None)
    if config is not None:
        return type(config).__name__
    for child in unwrap_module(module).modules():
        registry = getattr(child, REGISTRY, None)
        for name in getattr(registry, "hooks", {}):
            if name in NATIVE_CACHE_HOOKS:
                return str(name)
    return None


def num_timesteps(pipe: Any) -> int | None:
    """The number of denoiser steps the running loop announced, or None where the pipeline says nothing."""
    value = vars(pipe).get("_num_timesteps")
    return value if isinstance(value, int) else None


def attention_backends() -> dict[str, Any]:
    """Diffusers' attention backend names -> their enum member."""
    return {member.value: member for member in AttentionBackendName}


def compile_backends() -> list[str]:
    """The names torch.compile takes as `backend`."""
    import torch._dynamo

    return list(torch._dynamo.list_backends(exclude_tags=()))


def compile_counts() -> tuple[int, int]:
    """(graphs compiled, graph breaks) in this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def no_duck_shape() -> Any:
    """A context manager in which torch.compile does not take equal dynamic sizes for one size."""
    config: Any = importlib.import_module("torch.fx.experimental._config")
    return config.patch(use_duck_shape=False)


def leaves(output: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """(the tensors of a model's output, a function that builds such an output from other tensors).

    Tuples, lists, dicts and diffusers' output classes are looked into.
    """
    from torch.utils import _pytree as tree

    flat, form = tree.tree_flatten(output)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        whole = list(rest)
        for place, tensor in zip(places, tensors, strict=True):
            whole[place] = tensor
        return tree.tree_unflatten(whole, form)

    return [flat[place] for place in places], rebuild


def drift() -> list[str]:
    """What the installed diffusers / torch no longer offer of the names used here; empty when all is well."""
    missing: list[str] = []

    def need(owner: Any, *names: str) -> None:
        missing.extend(f"{getattr(owner, '__name__', owner)}.{n}" for n in names if not hasattr(owner, n))

    probe = torch.nn.Linear(1, 1)
    registry = HookRegistry.check_if_exists_or_initialize(probe)
    need(HookRegistry, "register_hook", "remove_hook", "invalidate_child_registries_cache")
    need(registry, "hooks", "_hook_order", "_fn_refs", "_module_ref")
    need(HookFunctionReference(), "pre_forward", "post_forward", "forward", "original_forward")
    need(StateManager(dict), "_context", "set_context", "reset")
    need(_AttentionBackendRegistry, "_active_backend")
    need(torch.nn.Module, COMPILED, "_call_impl")
    need(importlib.import_module("torch._dynamo.utils"), "counters")
    need(importlib.import_module("torch.fx.experimental._config"), "use_duck_shape", "patch")
    need(importlib.import_module("torch._dynamo.decorators"), "skip")
    if not hasattr(probe, REGISTRY):
        missing.append(f"module.{REGISTRY}")
    if "recurse" not in inspect.signature(HookRegistry.remove_hook).parameters:
        missing.append("HookRegistry.remove_hook(recurse)")
    return missing
