"""Who holds this module: one owner at a time, known by the module, and forgotten with either of the two."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Holders(Generic[T]):
    """Module -> whoever has taken hold of it; neither is kept alive."""

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[T]] = weakref.WeakKeyDictionary()

    def take(self, module: torch.nn.Module, holder: T) -> None:
        """`holder` holds it from now on."""
        self._rows[module] = weakref.ref(holder)

    def of(self, module: torch.nn.Module) -> T | None:
        """Whoever holds it; None where nobody does, or whoever did is gone."""
        ref = self._rows.get(module)
        return None if ref is None else ref()

    def release(self, module: torch.nn.Module) -> None:
        """Nobody holds it any more."""
        self._rows.pop(module, None)
