"""Let an attention processor call our attention instead of diffusers' dispatcher or PyTorch's SDPA.

A processor's `__call__` is used again as it is (the same code object), in a namespace in which the two names
`dispatch_attention_fn` and `F` mean ours. No class or module of diffusers is written to, no file is copied, and the
dispatcher's enum and registry stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..core.classes import SharedSubclasses
from ..core.wrappers import own_modules

DISPATCH = "dispatch_attention_fn"
SDPA = "scaled_dot_product_attention"
_ROUTED = SharedSubclasses("_diffaccel_routed")  # of intercepted processors


def _names(code: types.CodeType) -> set[str]:
    """Every global and attribute name in a function's code, nested functions included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def plain_class(processor: Any) -> type:
    """The class a processor came with."""
    return _ROUTED.plain(type(processor))


def form(processor: Any) -> str | None:
    """How a processor computes attention: "dispatch", "sdpa", or None: in a way that cannot be intercepted."""
    cls = plain_class(processor)
    call = inspect.getattr_static(cls, "__call__", None)
    if not isinstance(call, types.FunctionType):
        return None
    known = _FORMS.get(call)
    if known is None:
        known = _FORMS[call] = _form_of(call)
    return known or None


_FORMS: weakref.WeakKeyDictionary[types.FunctionType, str] = weakref.WeakKeyDictionary()  # "": cannot be intercepted


def _form_of(call: types.FunctionType) -> str:
    space = call.__globals__
    names = _names(call.__code__).union(*(_names(helper.__code__) for helper in _helpers(call).values()))
    if DISPATCH in names and DISPATCH in space:
        return "dispatch"
    if SDPA in names and isinstance(space.get("F"), types.ModuleType):
        return "sdpa"
    return ""


def _helpers(call: types.FunctionType) -> dict[str, types.FunctionType]:
    """Functions of the same module through which a function comes to its attention, by name."""
    found: dict[str, types.FunctionType] = {}
    waiting = [call]
    while waiting:
        for name in sorted(_names(waiting.pop().__code__)):
            helper = call.__globals__.get(name)
            if not isinstance(helper, types.FunctionType) or helper.__globals__ is not call.__globals__:
                continue
            if name not in found and not {DISPATCH, SDPA}.isdisjoint(_names(helper.__code__)):
                found[name] = helper
                waiting.append(helper)
    return found


def processors(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """(path, attention module, processor) of every module of a denoiser that has a processor."""
    for name, child in own_modules(module).items():
        processor = getattr(child, "processor", None)
        if processor is not None and callable(processor):
            yield name, child, processor


def rebound(call: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """The same function (and the helpers it comes to attention through) in a copy of its namespace with other names.

    The copy has no `__name__`: torch.compile takes a namespace with one for the module of that name, and would guard
    on what stands there.
    """
    assert isinstance(call, types.FunctionType)
    space = {**call.__globals__, **names}
    space.pop("__name__", None)
    for name, helper in _helpers(call).items():
        space[name] = _in_space(helper, space)
    return _in_space(call, space)


def _in_space(function: types.FunctionType, space: dict[str, Any]) -> types.FunctionType:
    made = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def functional(sdpa: Callable[..., Any]) -> types.ModuleType:
    """torch.nn.functional with another scaled_dot_product_attention."""
    made = types.ModuleType("torch.nn.functional")
    vars(made).update(vars(torch.nn.functional))
    vars(made)[SDPA] = sdpa
    return made


def routed_class(cls: type, dispatch: Callable[..., Any], sdpa: types.ModuleType, enter: Callable[..., Any]) -> type:
    """The one subclass that all intercepted processors of a class share.

    `enter(call, plain, processor, attention module, ...)` runs the intercepted `call`, or the class's own `plain`.
    """

    def body(cls: Any) -> dict[str, Any]:
        plain = cls.__call__
        call = rebound(plain, {DISPATCH: dispatch, "F": sdpa})

        @functools.wraps(plain)
        def __call__(self: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
            return enter(call, plain, self, attn, *args, **kwargs)

        return {"__call__": __call__}

    return _ROUTED.of(cls, body)
