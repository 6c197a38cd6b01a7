"""A deep fingerprint of a pipeline, for the undo tests."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from tests import tiny


@dataclasses.dataclass(frozen=True, eq=False)
class Ref:
    """An object compared by identity; holding it keeps its id from being reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        text = f"{self.value:.60}" if isinstance(self.value, str) else type(self.value).__name__
        name = getattr(self.value, "__qualname__", None) or getattr(self.value, "__name__", "")
        return f"<{text} {name} at {id(self.value):#x}>"


# What a plain `__call__` itself writes on a pipeline: their presence is compared, their values are not.
_RUN_ATTRIBUTES = {
    "_guidance_scale", "_guidance_scale_2", "_guidance_rescale", "_joint_attention_kwargs",
    "_attention_kwargs", "_cross_attention_kwargs", "_current_timestep", "_interrupt", "_num_timesteps",
    "_clip_skip", "_denoising_end", "_skip_layer_guidance_scale",
}  # fmt: skip
_MODULE_TABLES = (
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_PRIMITIVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _value(value: Any) -> Any:
    """What is compared of an attribute: primitives by value, containers by size, all else by identity."""
    if isinstance(value, _PRIMITIVES):
        return value
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return (type(value).__name__, len(value))
    return Ref(value)


def _registry(module: torch.nn.Module) -> list[tuple[str, Ref]]:
    """Names and hooks of the module's diffusers registry, innermost first; empty without one."""
    registry = vars(module).get("_diffusers_hook")
    return [] if registry is None else [(name, Ref(registry.hooks[name])) for name in registry._hook_order]


def _module_print(module: torch.nn.Module) -> dict[str, Any]:
    """The fingerprint of one module."""
    attributes: dict[str, Any] = {}
    for key, value in vars(module).items():
        if key == "_diffusers_hook":
            continue  # an empty registry may stay; what it holds is compared below
        if key in _MODULE_TABLES:
            attributes[key] = [(name, Ref(entry)) for name, entry in value.items()]
        else:
            attributes[key] = _value(value)
    found = {
        "class": Ref(type(module)),
        "vars": attributes,
        "forward in vars": "forward" in vars(module),
        "registry": _registry(module),
    }
    processor = getattr(module, "processor", None)
    if processor is not None:
        found["processor"] = Ref(processor)
        found["processor class"] = Ref(type(processor))
        found["processor vars"] = {key: _value(value) for key, value in vars(processor).items()}
        found["attention backend"] = getattr(processor, "_attention_backend", None)
    return found


def _class_print(cls: type) -> dict[str, Ref]:
    """Every attribute of one class, by identity."""
    skipped = {"__weakref__", "__dict__", "_abc_impl", "__annotations__", "__annotations_cache__"}
    if cls is torch.nn.Module:  # torch's own compiler patches these three when it is first used
        skipped |= {"__init__", "__setstate__", "___needs_generation_tag_patch"}
    return {key: Ref(value) for key, value in vars(cls).items() if key not in skipped}


def snapshot_pipe(pipe: Any) -> dict[str, Any]:
    """A deep fingerprint of a pipeline, its modules, their classes and the process-wide attention state.

    Take it after one plain run: the first run itself adds run-time attributes to pipeline and scheduler.
    """
    from diffusers.hooks import HookRegistry
    from diffusers.models import attention_dispatch

    classes: dict[str, type] = {}

    def note(cls: type) -> None:
        for base in cls.__mro__:
            if base is not object:
                classes.setdefault(f"{base.__module__}.{base.__qualname__}", base)

    note(type(pipe))
    note(HookRegistry)
    note(type(pipe.scheduler))
    modules: dict[str, Any] = {}
    orders: dict[str, Any] = {}
    for name, component in tiny.component_modules(pipe):
        orders[name] = {
            "state_dict": list(component.state_dict()),
            "named_modules": [key for key, _ in component.named_modules()],
        }
        for path, module in component.named_modules():
            modules[f"{name}.{path}" if path else name] = _module_print(module)
            note(type(module))
            if getattr(module, "processor", None) is not None:
                note(type(module.processor))
    dispatchers = {
        cls.__module__: Ref(vars(sys.modules[cls.__module__])["dispatch_attention_fn"])
        for cls in classes.values()
        if hasattr(sys.modules.get(cls.__module__), "dispatch_attention_fn")
    }
    backends = attention_dispatch._AttentionBackendRegistry
    return {
        "pipe": {
            "class": Ref(type(pipe)),
            "vars": {
                key: "(run time)" if key in _RUN_ATTRIBUTES else _value(value) for key, value in vars(pipe).items()
            },
            "config": {key: _value(value) for key, value in dict(pipe.config).items()},
        },
        "modules": modules,
        "orders": orders,
        "classes": {name: _class_print(cls) for name, cls in classes.items()},
        "scheduler": {"class": Ref(type(pipe.scheduler)), "vars": sorted(vars(pipe.scheduler))},
        "process": {
            "active attention backend": backends._active_backend,
            "attention backends": {str(key): Ref(value) for key, value in backends._backends.items()},
            "dispatch_attention_fn": dispatchers,
            "scaled_dot_product_attention": Ref(torch.nn.functional.scaled_dot_product_attention),
            "inference mode": torch.is_inference_mode_enabled(),
            "grad mode": torch.is_grad_enabled(),
        },
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """What differs between two fingerprints, one sentence each."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{path}: {key!r} is gone (was {a[key]!r})" for key in a if key not in b]
        found += [f"{path}: {key!r} is new ({b[key]!r})" for key in b if key not in a]
        if not found and list(a) != list(b):
            found.append(f"{path}: order changed from {list(a)} to {list(b)}")
        for key in a:
            if key in b:
                found += differences(a[key], b[key], f"{path}/{key}" if path else str(key))
        return found
    if isinstance(a, list) and isinstance(b, list) and a != b:
        changed = [(x, y) for x, y in zip(a, b, strict=False) if x != y][:3]
        return [f"{path}: list of {len(a)} became list of {len(b)}; first changes {changed}"]
    return [] if a == b else [f"{path}: {a!r} became {b!r}"]


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Fail with the differences between two fingerprints, if there are any."""
    found = differences(a, b)
    assert not found, f"{len(found)} traces left:\n  " + "\n  ".join(found[:20])
