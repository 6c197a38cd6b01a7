"""What decides a text encoder's output beside its parameters and buffers, as a digest that outlives the process.

Every attribute of every module is either taken by value (numbers, text, tensors, objects and functions made of such)
or, where its value cannot be told from outside, the encoder's outputs are not kept. Forward hooks inside the encoder
are taken to look on, as nearly all do; one that changes what a layer gives needs `text_cache_bytes=0` and no store.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...core.compat import REGISTRY
from .embeddings import Unkeepable, digest

# What PyTorch keeps of a module: the tensors are hashed by content elsewhere, the hooks are looked at below.
_MACHINERY = frozenset(vars(torch.nn.Module())) - {"training"}
# What transformers notes about loading and its own hooks, which changes no output.
_NOT_SETTINGS = frozenset({"name_or_path", "_name_or_path", "_is_hf_initialized", "_output_capturing_hooks_installed"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DEEPEST = 12  # of objects within objects
_DIGESTS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> (version, place, digest)


def settings(module: torch.nn.Module) -> str:
    """A digest of the classes and attributes of every submodule.

    Raises:
        Unkeepable: something in it whose value cannot be told.
    """
    made, seen = hashlib.sha256(), {id(module): 0}
    for name, child in module.named_modules():
        made.update(f"{name}:{type(child).__module__}.{type(child).__qualname__}".encode())
        for key, value in sorted(vars(child).items()):
            own = key in _MACHINERY or key in _NOT_SETTINGS or key == REGISTRY
            if not own and not (child is module and isinstance(value, (types.FunctionType, functools.partial))):
                made.update(f"|{key}=".encode())
                _feed(made, value, seen, 0)
    return made.hexdigest()[:32]


def _code(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}:{'' if code is None else hashlib.sha256(code.co_code).hexdigest()}"


def _feed(made: Any, value: Any, seen: dict[int, int], depth: int) -> None:
    if isinstance(value, _PLAIN):
        made.update(f"{type(value).__name__}:{value!r};".encode())
    elif isinstance(value, enum.Enum):
        made.update(f"{type(value).__qualname__}.{value.name};".encode())
    elif isinstance(value, torch.Tensor):
        made.update(_digest(value).encode())
    elif isinstance(value, torch.nn.Module):
        made.update(f"module {type(value).__module__}.{type(value).__qualname__};".encode())
    elif id(value) in seen:
        made.update(f"again {seen[id(value)]};".encode())
    elif depth == _DEEPEST:
        raise Unkeepable(f"{type(value).__qualname__}: objects within objects, too deep to look into")
    else:
        seen[id(value)] = len(seen)
        _feed_inside(made, value, seen, depth + 1)


def _feed_inside(made: Any, value: Any, seen: dict[int, int], depth: int) -> None:
    if isinstance(value, (type, types.BuiltinFunctionType)):
        made.update(f"{value.__module__}.{value.__qualname__};".encode())
        return
    inside: list[Any]
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: repr(item[0]))
        inside = [part for key, part in items if key not in _NOT_SETTINGS for part in (key, part)]
    elif isinstance(value, Set):
        inside = sorted(value, key=repr)
    elif isinstance(value, (list, tuple)):
        inside = list(value)
    else:
        inside = _inside_object(value)
    made.update(f"{type(value).__module__}.{type(value).__qualname__}[{len(inside)}]".encode())
    for part in inside:
        _feed(made, part, seen, depth)


def _inside_object(value: Any) -> list[Any]:
    """What makes up a function, a bound method, a partial, or an object with attributes."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_code(value), value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    state = getattr(value, "__dict__", None)
    if state is None or type(value).__module__ in ("_thread", "weakref", "threading"):
        raise Unkeepable(f"{type(value).__module__}.{type(value).__qualname__}")
    return [part for key in sorted(state) if key not in _NOT_SETTINGS for part in (key, state[key])]


def _digest(tensor: torch.Tensor) -> str:
    """By content, looked at again only where the tensor was written since."""
    place = (tensor._version, tensor.data_ptr(), tensor.shape, tensor.dtype)
    known = _DIGESTS.get(tensor)
    if known is None or known[0] != place:
        known = _DIGESTS[tensor] = (place, digest({"": tensor}))
    found: str = known[1]
    return found
