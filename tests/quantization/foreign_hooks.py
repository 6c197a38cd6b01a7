"""What other libraries and users put on a model: for tests that take ours off while it is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


def group_offload(module: torch.nn.Module) -> None:
    """diffusers' group offload, layer by layer."""
    module.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type="leaf_level")


def layerwise_casting(module: torch.nn.Module) -> None:
    """diffusers' layerwise casting."""
    module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def layer_hooks(module: torch.nn.Module) -> None:
    """accelerate's hook on every linear layer."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for child in module.modules():
        if isinstance(child, torch.nn.Linear):
            add_hook_to_module(child, AlignDevicesHook(execution_device="cpu"))


def own_forward(module: torch.nn.Module) -> None:
    """A user's forward around the one that was there, in a closure that nobody can look into."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: forward(*args)

    for child in module.modules():
        if isinstance(child, torch.nn.Linear):
            child.forward = around(child.forward)


HOOKS = {
    "group offload": group_offload,
    "layerwise casting": layerwise_casting,
    "accelerate": layer_hooks,
    "own forward": own_forward,
}
