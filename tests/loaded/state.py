"""What a pipeline holds, down to the bits of weights that others quantized: compared before and after."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from tests import tiny


def state_of(pipe: Any) -> dict[str, Any]:
    """By name: class, dtype, shape, bits and kept state of every parameter and buffer; the class of every module."""
    found: dict[str, Any] = {}
    for name, component in tiny.component_modules(pipe):
        for path, module in component.named_modules():
            found[f"{name}.{path}"] = type(module)
            away = getattr(getattr(module, "_hf_hook", None), "weights_map", None)  # of accelerate's offload
            for key, tensor in {**module._parameters, **module._buffers}.items():
                if away is not None and tensor is not None and tensor.is_meta:
                    found[f"{name}.{path} away.{key}"] = describe(away[key])
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        found[f"{name}.{path}.{key}"] = (id(tensor), *describe(tensor))
    return found


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor in a form that can be compared."""
    kept = {key: value for key, value in vars(tensor).items() if not key.startswith("_")}
    parts = getattr(tensor, "__tensor_flatten__", None)
    kind = type(tensor)
    if parts is not None and kind not in (torch.Tensor, torch.nn.Parameter):
        inside = tuple((part, _any(getattr(tensor, part))) for part in parts()[0])
        return kind, tensor.dtype, tensor.shape, inside
    return kind, tensor.dtype, tensor.shape, _digest(tensor), tuple((key, _any(kept[key])) for key in sorted(kept))


def _any(value: Any) -> Any:
    """Tensors by their bits, objects of libraries by what they hold, modules and all else by their kind."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, (bool, int, float, str, tuple, torch.dtype, torch.device, type(None))):
        return value
    if isinstance(value, torch.nn.Module):
        return type(value)
    held = getattr(value, "__dict__", None)
    return (type(value), tuple((key, _any(held[key])) for key in sorted(held))) if isinstance(held, Mapping) else value


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "away"
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(torch.Tensor).contiguous().flatten()
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"").hexdigest()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose entries differ."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]
