"""Layers of ours around a method of one object, which can be taken off in any order and leave nothing.

All layers of a method share one stand-in among the object's own attributes; with the last layer it goes. A deep copy
of the object, or one that was pickled, has the plain method.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compat import Argument, Output
    from .compat import Forward as Layer  # called as layer(below, *args, **kwargs); `below` is the method without it

_ABSENT = object()


class LayeredMethod:
    """Stands in for `owner.NAME`; keeps its name, signature and documentation."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = weakref.ref(owner), name
        self.before = vars(owner).get(name, _ABSENT)
        self.layers: list[Layer] = []  # innermost first
        functools.update_wrapper(self, getattr(owner, name))

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        below: Layer = self.__wrapped__  # type: ignore[attr-defined]
        for layer in self.layers:
            below = functools.partial(layer, below)
        return below(*args, **kwargs)

    def __reduce__(self) -> tuple[Layer, tuple[object, str]]:
        return getattr, (self.owner(), self.name)

    def remove(self, layer: Layer) -> None:
        """Take a layer off (a second time does nothing). Under another library's stand-in ours stays, empty."""
        self.layers = [one for one in self.layers if one is not layer]
        owner = self.owner()
        if self.layers or owner is None or vars(owner).get(self.name) is not self:
            return
        if self.before is _ABSENT:
            del vars(owner)[self.name]
        else:
            vars(owner)[self.name] = self.before


def add_layer(owner: object, name: str, layer: Layer) -> Callable[[], None]:
    """Run every call of `owner.NAME` as `layer(below, *args, **kwargs)`; returns what takes the layer off."""
    found = vars(owner).get(name)
    if not isinstance(found, LayeredMethod):
        found = vars(owner)[name] = LayeredMethod(owner, name)
    found.layers.append(layer)
    return functools.partial(found.remove, layer)
