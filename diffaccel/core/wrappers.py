"""What others put around a model, and the model inside: peft, DataParallel, FSDP, torch.compile.

A wrapper is called in the model's place and hands the call on; what a card or a lever names are the model's own
modules. Attributes are read on the model, since some wrappers forward them (`getattr`) and `vars` never does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp.FSDPModule"
_COMPILED = "torch._dynamo.eval_frame.OptimizedModule"

# Class of a wrapper -> the path of attributes to the model inside. By name, so that nothing is imported for it.
_INSIDE = {
    _COMPILED: ("_orig_mod",),
    _FSDP1: ("_fsdp_wrapped_module",),
    "torch.nn.parallel.data_parallel.DataParallel": ("module",),
    "torch.nn.parallel.distributed.DistributedDataParallel": ("module",),
    "peft.peft_model.PeftModel": ("base_model", "model"),
}


_SEEN: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def _kinds(cls: type) -> frozenset[str]:
    """Which of the classes that are known here this one is, or is made of."""
    found = _SEEN.get(cls)
    if found is None:
        names = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
        found = _SEEN[cls] = frozenset(names & {*_INSIDE, _FSDP2})
    return found


def _inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that this one is the wrapper of, or None."""
    path = next((_INSIDE[kind] for kind in _kinds(type(module)) if kind in _INSIDE), None)
    found: object = module
    for name in path or ():
        found = getattr(found, "_modules", {}).get(name)
    return found if path is not None and isinstance(found, torch.nn.Module) else None


def wrappers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The wrappers around a model, outermost first; none where it is plain."""
    inside = _inside(module)
    while inside is not None:
        yield module
        module, inside = inside, _inside(inside)


def unwrap_module(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside of all its wrappers."""
    inside = _inside(module)
    while inside is not None:
        module, inside = inside, _inside(inside)
    return module


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules inside of a model by the names they had before any of them (a compiled block) was wrapped."""
    inside = unwrap_module(module)
    named = dict(inside.named_modules())  # a wrapper comes before what is inside, which takes its name
    if not any([_kinds(cls) & {_COMPILED, _FSDP1} for cls in _classes(inside)]):
        return named
    levels = {path[0] for path in _INSIDE.values() if len(path) == 1 and path[0].startswith("_")}
    return {".".join([part for part in path.split(".") if part not in levels]): child for path, child in named.items()}


def attributes_of(module: torch.nn.Module) -> torch.nn.Module:
    """Where attributes that are set on `module` come to lie: torch.compile's wrapper hands them to what is inside."""
    while is_compiled(module):
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
    return module


def is_compiled(module: torch.nn.Module) -> bool:
    """Is this torch.compile's own wrapper?"""
    return _COMPILED in _kinds(type(module))


def in_a_graph(module: torch.nn.Module) -> bool:
    """Is torch.compile's wrapper among those around the model?"""
    return any(is_compiled(wrapper) for wrapper in wrappers(module))


def class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of the model inside, as it was before `fully_shard` made a subclass of it."""
    cls = type(unwrap_module(module))
    return next(base for base in cls.__mro__ if _FSDP2 not in _kinds(base))


def peft_wrapped(module: torch.nn.Module) -> bool:
    """Did peft's `get_peft_model` wrap the model (where `add_adapter` only puts adapters into it)?"""
    return any("peft.peft_model.PeftModel" in _kinds(type(wrapper)) for wrapper in wrappers(module))


def _classes(module: torch.nn.Module) -> set[type]:
    """The classes of all modules in it: few, where modules are many (this is asked in every run)."""
    return set(map(type, module.modules()))


def sharded(module: torch.nn.Module) -> torch.nn.Module | None:
    """The first module in it whose parameters FSDP has cut into shards, or None."""
    cut = [cls for cls in _classes(module) if _kinds(cls) & {_FSDP1, _FSDP2}]
    return next(child for child in module.modules() if type(child) in cut) if cut else None


def shard_group(module: torch.nn.Module) -> ProcessGroup | None:
    """The processes that hold the shards of a model, which must call the same layers; None for this one alone."""
    found = sharded(module)
    if found is None:
        return None
    group: ProcessGroup | None = getattr(found, "process_group", None)  # FSDP 1
    mesh = next((p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")), None)  # FSDP 2
    if group is None and mesh is not None:
        group = mesh.get_group(mesh.ndim - 1)
    return group if torch.distributed.get_world_size(group) > 1 else None


def flattened(module: torch.nn.Module) -> bool:
    """Has FSDP 1 put parameters in it into one flat vector, so that layers have none of their own between calls?"""
    return any([_FSDP1 in _kinds(cls) for cls in _classes(module)])


def replicated(module: torch.nn.Module) -> str:
    """That DataParallel runs copies of the model on several devices, in a clause; "" where the model itself runs."""
    devices = max((len(getattr(wrapper, "device_ids", None) or ()) for wrapper in wrappers(module)), default=0)
    if devices < 2:
        return ""
    return f"DataParallel runs copies of it on {devices} devices, which nothing that is put on its blocks reaches"
