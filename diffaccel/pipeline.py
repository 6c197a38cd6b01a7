"""The clothes of an accelerated pipeline: one shared subclass per class, with the verbs.

`pipe.__class__` becomes a subclass of the same name, so that `isinstance`, `save_pretrained` and everything else
of diffusers go on as before; the class of diffusers itself is never written to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .core.handle import Acceleration
from .core.rules import PLACES
from .core.run import current_run
from .errors import IncompatibleError

if TYPE_CHECKING:
    from .planner.plan import Plan

HANDLE = "_diffaccel"  # instance attribute of an accelerated pipeline
_CLASSES: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def handle_of(pipe: Any) -> Acceleration | None:
    """The handle of a pipeline, or None where it is not accelerated."""
    found = getattr(pipe, "__dict__", {}).get(HANDLE)
    return found if isinstance(found, Acceleration) else None


class Accelerated:
    """What an accelerated pipeline can do more. Every verb returns the pipeline, and raises where it cannot act."""

    @property
    def acceleration(self) -> Acceleration:
        """The handle: `.plan`, `.report`, `.restore()`, `.snapshot()`, `.resume(state)`."""
        handle = handle_of(self)
        if handle is None:
            raise AttributeError(f"this {type(self).__name__} is not accelerated: call diffaccel.accelerate(pipe)")
        return handle

    def progress_bar(self, iterable: Any = None, total: Any = None) -> Any:
        """Diffusers' own bar; during an accelerated run its postfix counts the cached calls."""
        bar = super().progress_bar(iterable, total)  # type: ignore[misc]
        run = current_run()
        if run is not None and run.pipe is self and not getattr(bar, "disable", True):
            run.bar = bar
        return bar

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise IncompatibleError(
            "copy.deepcopy of an accelerated pipeline: the copy's hooks would run the original's weights. Call "
            "diffaccel.restore(pipe) first, copy, then accelerate both."
        )

    # Verbs whose place has no method registry.

    def enable_attention(self, backend: str = "auto") -> Any:
        """Choose the attention backend of the denoisers: "auto", "native", "flash" or "flex"."""
        return _enable(self, "attention", backend, {})

    def disable_attention(self) -> Any:
        """Back to the attention the pipeline came with."""
        return _disable(self, "attention")

    def disable_cache(self) -> Any:
        """Take the step cache off."""
        return _disable(self, "cache")

    def enable_compile(self, **parameters: Any) -> Any:
        """Compile the denoisers' blocks one by one; keywords are those of `compilation.regional.RegionalCompile`."""
        return _enable(self, "compile", True, parameters)

    def disable_compile(self) -> Any:
        """Back to uncompiled blocks (those the user compiled stay compiled)."""
        return _disable(self, "compile")

    def enable_vae_tiling(self, exact: bool = False, **sizes: Any) -> Any:
        """Decode in tiles; `sizes` (tile_height, tile_width, stride_height, stride_width, in pixels) are those of
        `memory.vae_tiling.VaeTiling`. `exact=True`, tiles without any change of the picture, comes later."""
        return _enable(self, "vae_tiling", "exact" if exact else "blended", sizes)

    def disable_vae_tiling(self) -> Any:
        """Back to the tiling (or none) that the VAE came with."""
        return _disable(self, "vae_tiling")


def _enable(pipe: Any, key: str, value: str | bool, parameters: dict[str, Any]) -> Any:
    from .planner.resolve import resolve

    handle = pipe.acceleration
    place = PLACES[key]
    prefix = place.prefixes[0] if place.prefixes else ""
    wishes = {k: v for k, v in handle.wishes.items() if k != key and not (prefix and k.startswith(prefix))}
    one = {key: value, **{prefix + k: v for k, v in parameters.items() if v is not None}}
    resolve(pipe, None, None, handle.stack.target.hardware, True, one)  # raises where it cannot act
    before = handle.wishes.get(key)
    swapped = before not in (None, False, value)
    note = f"{place.item(value)} took the place of {place.item(before)}" if swapped else None
    return _swap(pipe, {**wishes, **one}, note)


def _disable(pipe: Any, key: str) -> Any:
    handle = pipe.acceleration
    prefixes = PLACES[key].prefixes
    rest = {k: v for k, v in handle.wishes.items() if k != key and not (prefixes and k.startswith(prefixes))}
    return _swap(pipe, rest, None)


def _swap(pipe: Any, wishes: dict[str, Any], note: str | None) -> Any:
    from dataclasses import replace

    from .api import accelerate

    before = pipe.acceleration
    accelerate(pipe, None, budget=before.plan.budget, hardware=before.stack.target.hardware, **wishes)
    plan: Plan = pipe.acceleration.plan
    pipe.acceleration.set_plan(replace(plan, preset=before.plan.preset, notes=(note,) if note else ()))
    return pipe


def _verb(value: str) -> Callable[..., Any]:
    """`enable_VALUE_cache(**parameters)` for one cache method of the registry."""

    def verb(self: Any, **parameters: Any) -> Any:
        return _enable(self, "cache", value, parameters)

    return verb


def cache_verb_name(value: str) -> str:
    """The verb of a cache method: `enable_first_block_cache`, `enable_teacache`, `enable_step_schedule`."""
    names = {"first_block": "first_block_cache", "interval": "interval_cache", "schedule": "step_schedule"}
    return f"enable_{names.get(value, value)}"


def _verbs() -> dict[str, Any]:
    from .caching.methods import METHODS
    from .planner.options import parameter_names

    verbs: dict[str, Any] = {}
    for value in PLACES["cache"].values:
        verb, name = _verb(str(value)), cache_verb_name(str(value))
        verb.__name__, verb.__qualname__ = name, f"Accelerated.{name}"
        method = METHODS.get(str(value))
        knobs = ", ".join(parameter_names(PLACES["cache"], value))
        verb.__doc__ = f"{method.__doc__}\n\nKeywords: {knobs}." if method else f"{value}: not in this version."
        verbs[name] = verb
    return verbs


def accelerated_class(cls: type) -> type:
    """The one subclass that all accelerated instances of `cls` share."""
    if issubclass(cls, Accelerated):
        return cls
    found = _CLASSES.get(cls)
    if found is None:
        plain_call = cls.__call__

        @functools.wraps(plain_call)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            handle = handle_of(self)
            if handle is None:
                return plain_call(self, *args, **kwargs)
            return handle.call(self, plain_call, args, kwargs)

        body = {
            "__call__": __call__,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            **_verbs(),
        }
        found = _CLASSES[cls] = type(cls.__name__, (Accelerated, cls), body)
    return found


def clothe(pipe: Any, handle: Acceleration) -> None:
    """Make `pipe` an accelerated instance of its class."""
    object.__setattr__(pipe, "__class__", accelerated_class(type(pipe)))
    vars(pipe)[HANDLE] = handle


def unclothe(pipe: Any) -> None:
    """Give `pipe` its own class back."""
    if isinstance(pipe, Accelerated):
        plain = next(c for c in type(pipe).__mro__ if not issubclass(c, Accelerated))
        object.__setattr__(pipe, "__class__", plain)
        vars(pipe).pop(HANDLE, None)
