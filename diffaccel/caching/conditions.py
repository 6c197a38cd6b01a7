"""Whether what a denoiser is told beside latents, time and prompt is still what it was told at the step before.

Control pictures and their strengths, reference pictures, windows of guidance: a cached answer holds them, so a step at
which one of them changes is computed, and what was remembered before it is forgotten. Compared on the host: objects
first, and values only where an object is another one (which waits for the device).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..core.callbacks import version_of
from ..core.compat import unwrap_module
from ..models.controls import CONDITIONS, NESTED, ONCE

Told = Mapping[str, Any]  # conditions of one call, by name


class Kept:
    """Conditions as they were at a call, with the versions of their tensors."""

    __slots__ = ("told", "versions")

    def __init__(self, told: Told) -> None:
        self.told = told
        self.versions = [version_of(tensor) for tensor in _tensors(tuple(told.values()))]

    def fork(self) -> Kept:
        """The same, for another run: nothing here is written into."""
        return self


def changed(before: Kept, now: Kept) -> bool:
    """Do two calls differ in what they are told?"""
    if before.told.keys() != now.told.keys():
        return True
    return not _alike(tuple(before.told.values()), tuple(now.told.values()), iter(before.versions), iter(now.versions))


def _alike(old: Any, new: Any, versions: Iterator[int], now: Iterator[int]) -> bool:
    if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
        written = next(versions) != next(now)
        if old is new or _same_place(old, new):
            return not written
        return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device and torch.equal(old, new)
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return list(old) == list(new) and _alike(list(old.values()), list(new.values()), versions, now)
    if isinstance(new, (list, tuple)) and isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(_alike(a, b, versions, now) for a, b in zip(old, new, strict=True))
    return old is new or (isinstance(new, (bool, int, float, str)) and bool(old == new))


def _same_place(old: torch.Tensor, new: torch.Tensor) -> bool:
    return (
        old.layout is torch.strided
        and new.layout is torch.strided
        and old.device == new.device
        and old.dtype == new.dtype
        and old.shape == new.shape
        and old.stride() == new.stride()
        and old.data_ptr() == new.data_ptr()
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def holds_tensors(value: Any) -> bool:
    """Is there a tensor in this argument?"""
    return next(_tensors(value), None) is not None


def told_of(kwargs: Mapping[str, Any], outside: Sequence[str]) -> dict[str, Any]:
    """The conditions among the arguments of a denoiser call.

    `outside` are the arguments that act on blocks from outside: where they hold tensors, their presence counts (their
    values follow the latents), else their value does.
    """
    found = {name: kwargs[name] for name in CONDITIONS if kwargs.get(name) is not None}
    for group in NESTED:
        inner = kwargs.get(group)
        if inner:
            found |= {name: inner[name] for name in CONDITIONS if inner.get(name) is not None}
    for name in outside:
        value = kwargs.get(name)
        if value is not None and name not in found:
            found[name] = True if name in ONCE or holds_tensors(value) else value
    return found


def scaled_processors(module: torch.nn.Module) -> list[Any]:
    """The attention processors that add a reference picture (IP-Adapter) with a `scale` of their own."""
    processors = getattr(unwrap_module(module), "attn_processors", None) or {}
    return [one for one in processors.values() if isinstance(getattr(one, "scale", None), (list, tuple))]
