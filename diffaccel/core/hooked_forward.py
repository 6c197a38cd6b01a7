"""Doing a module's work without calling it, while its offload hooks still see a call.

The strips of an exact decode walk through blocks layer by layer, so that `block.forward` never runs. What moves its
weights (accelerate's hooks, diffusers' group offload) sits around that forward and must run all the same; what only
looks on (a hook of the user's) would be left out silently, so it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from .chain import around_forward

if TYPE_CHECKING:
    from .compat import Args, Argument, Forward, Kwargs, Output

HF_HOOK = "_hf_hook"  # set by accelerate's add_hook_to_module


class LoadHook:
    """A forward pre-hook of ours that loads weights: it neither sees nor changes what is computed.

    Where the component as a whole was loaded before, a module's work can be done past it.
    """

    def __init__(self, act: Callable[[Args], None]) -> None:
        self.act = act

    def __call__(self, module: torch.nn.Module, args: Args) -> None:
        self.act(args)


def has_foreign_hooks(module: torch.nn.Module) -> bool:
    """Does the module carry forward hooks other than `LoadHook`?"""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not isinstance(hook, LoadHook) for hook in hooks)


def run_hooked(module: torch.nn.Module, body: Forward, *args: Argument) -> Output:
    """`body(*args)` in the place of `module.forward(*args)`, within the offload hooks of the module.

    `args` are tensors only: hooks send whatever they get to a device.
    """
    around = around_forward(module)
    hook = vars(module).get(HF_HOOK)
    if hook is not None:
        around = [(hook.pre_forward, hook.post_forward), *around]
    if not around:
        return body(*args)
    kwargs: Kwargs = {}
    for before, _ in around:
        args, kwargs = before(module, *args, **kwargs)
    output = body(*args, **kwargs)
    for _, after in reversed(around):
        output = after(module, output)
    return output


def why_call_needed(modules: Iterable[tuple[str, torch.nn.Module]]) -> str | None:
    """Why the forward of one of these (name, module) pairs must really be called; None where it need not be."""
    for name, module in modules:
        state = vars(module)
        if has_foreign_hooks(module):
            return f"{name} ({type(module).__name__}) carries a forward hook, which strips would pass by"
        around = around_forward(module)
        if any(before is None for before, _ in around):
            return f"{name} ({type(module).__name__}) carries a hook of diffusers that replaces its forward"
        if "forward" in state and HF_HOOK not in state and not around:
            return f"the forward of {name} ({type(module).__name__}) was replaced"
    return None
