"""Where edits act, and what they do to the picture: two short lists that everything else is ordered by."""

from __future__ import annotations

from enum import Enum


class Slot(str, Enum):
    """Where an edit acts; slots are applied in this order and undone in reverse."""

    WEIGHT = "weight"
    MODULE = "module"
    CALL = "call"


class Fidelity(str, Enum):
    """What an accelerator does to the picture."""

    EXACT = "exact"  # bit-equal
    EQUIVALENT = "equivalent"  # same mathematics, other rounding
    LOSSY = "lossy"

    @property
    def rank(self) -> int:
        """0 for exact, 1 for equivalent, 2 for lossy."""
        return list(Fidelity).index(self)
