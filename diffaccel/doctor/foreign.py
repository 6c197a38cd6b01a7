"""What diffusers' own accelerators on a pipeline show by themselves, before anything is run, and in a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..core.compat import (
    CASTING,
    NATIVE_CACHE_HOOKS,
    REGISTRY,
    StateManager,
    attention_default,
    native_cache,
    unwrap_module,
)
from .diagnosis import Finding
from .patient import Patient

DENOISERS = ("transformer", "transformer_2", "unet")
COUNTING = ("pyramid_attention_broadcast", "faster_cache_block")  # hooks that count calls, whatever the branch


def denoisers(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The denoisers by name."""
    for name in DENOISERS:
        module = getattr(pipe, name, None)
        if isinstance(module, torch.nn.Module):
            yield name, unwrap_module(module)


def hooks(module: torch.nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path, name, hook) of all of diffusers' hooks below a module."""
    for path, part in module.named_modules():
        for name, hook in getattr(vars(part).get(REGISTRY), "hooks", {}).items():
            yield path, name, hook


def signs(pipe: Any) -> Iterator[Finding]:
    """Before anything is run."""
    for name, module in denoisers(pipe):
        yield from _dirty(name, module)
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            yield from _uncast(name, part)
    yield from _backend(pipe)


def _dirty(name: str, module: torch.nn.Module) -> Iterator[Finding]:
    """State that a run left behind: diffusers resets its caches where a run ends, not where it raises."""
    held = 0
    for _, hook_name, hook in hooks(module):
        if hook_name in NATIVE_CACHE_HOOKS:
            states = [value for value in vars(hook).values() if isinstance(value, StateManager)]
            held += sum(_tensors(state) for manager in states for state in _states(manager))
    if held:
        yield Finding("dirty-cache", name, f"{held} tensors of an earlier run are in the hooks of its cache")


def _states(manager: Any) -> list[Any]:
    return list(getattr(manager, "_state_cache", {}).values())


def _tensors(state: Any) -> int:
    values = list(vars(state).values())
    values += [part for value in values if isinstance(value, (tuple, list)) for part in value]
    values += [part for value in values if isinstance(value, dict) for part in value.values()]
    return sum(isinstance(value, torch.Tensor) for value in values)


def _uncast(name: str, part: torch.nn.Module) -> Iterator[Finding]:
    """Layers under layerwise casting whose weights rest in another dtype than the one for storage."""
    wrong, kind = 0, None
    for path, hook_name, hook in hooks(part):
        if hook_name == CASTING:
            rests = {p.dtype for p in part.get_submodule(path).parameters(recurse=False)}
            if rests and hook.storage_dtype not in rests:
                wrong, kind = wrong + 1, next(iter(rests))
    if wrong:
        yield Finding("casting-undone", name, f"{wrong} layers are to rest in 8 bits and are in {kind}")


def _backend(pipe: Any) -> Iterator[Finding]:
    """A process-wide backend that was moved, and layers of this pipeline that obey none."""
    active, default = attention_default()
    if active == default:
        return
    yield Finding("moved-backend", "attention of this process", f"it is {active}, and was {default}")
    for name, module in denoisers(pipe):
        found = [p for p in (getattr(m, "processor", None) for m in module.modules()) if p is not None]
        if found and not any(hasattr(processor, "_attention_backend") for processor in found):
            evidence = f"{type(found[0]).__name__} calls PyTorch itself: the backend {active} does nothing here"
            yield Finding("silent-fallback", name, evidence)


def cut_off(patient: Patient) -> Iterator[Finding]:
    """A cache of diffusers that leaves nothing out, and one that takes two branches for one."""
    for name, module in denoisers(patient.pipe):
        kinds = {hook_name for _, hook_name, _ in hooks(module)}
        report = patient.first.report
        branches = {step.branch for step in report.steps if step.component == name} if report is not None else set()
        if kinds & set(COUNTING) and len(branches) > 1:
            evidence = (
                f"{', '.join(sorted(kinds & set(COUNTING)))} counts calls, and {len(branches)} branches take turns"
            )
            yield Finding("mixed-branches", name, evidence)
        yield from _out_of_the_chain(name, module, native_cache(module), kinds)


def _out_of_the_chain(name: str, module: torch.nn.Module, cache: str | None, kinds: set[str]) -> Iterator[Finding]:
    """A cache that is on, and whose hooks are not there, or are called by nobody.

    `HookRegistry.remove_hook` gives the next hook the forward of the one it removes; one that stands in for that
    forward (`new_forward`) is so left out.
    """
    if cache is None:
        return
    if not kinds & set(NATIVE_CACHE_HOOKS):
        yield Finding("cut-off-cache", name, f"{cache} is on, and none of its layers has a hook of it")
        return
    lost = 0
    for _, hook_name, hook in hooks(module):
        stands_in = getattr(hook, "new_forward", None) if hook_name in NATIVE_CACHE_HOOKS else None
        if stands_in is not None and getattr(hook.fn_ref.forward, "func", None) != stands_in:
            lost += 1
    if lost:
        yield Finding("cut-off-cache", name, f"{lost} hooks of {cache} are out of the chain of calls")
