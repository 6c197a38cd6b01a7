"""One subclass per class, shared by all objects whose class is exchanged: compiled graphs then see one class."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping


class SharedSubclasses:
    """The subclasses of one lever. `mark` is the class attribute by which they are told from the classes of others."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._made: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()

    def of(self, cls: type, body: Callable[[type], Mapping[str, object]]) -> type:
        """The one subclass of `cls`: its name and module, and what `body(cls)` gives, asked for once."""
        made = self._made.get(cls)
        if made is None:
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, self.mark: True}
            made = self._made[cls] = type(cls.__name__, (cls,), {**names, **body(cls)})
        return made

    def plain(self, cls: type) -> type:
        """The class that one of these subclasses stands for; any other class is returned as it is."""
        return cls.__mro__[1] if self.mark in vars(cls) else cls
