"""What a lever keeps for the length of one run."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from .compat import Kept


@runtime_checkable
class Forks(Protocol):
    """State that knows how to be copied so that both copies go their own way."""

    def fork(self) -> Self:
        """The copy."""


class PerRun(dict["Kept", "Kept"]):
    """One lever's state of one run, by key (a branch, a component, the name of a count).

    Values are replaced rather than written into, so that a shallow copy of each is a fork; those that are written into
    have a `fork` of their own. A snapshot of a run holds a fork, and a run that goes on from it another.
    """

    def fork(self) -> PerRun:
        """The same state for another run."""
        return PerRun({k: v.fork() if isinstance(v, Forks) else copy.copy(v) for k, v in self.items()})
