"""What diffaccel knows about models, as data: one card per family, and a lookup by class name."""

from __future__ import annotations

from .registry import CARDS, lookup
from .spec import BlockList, ModelSpec

__all__ = ["CARDS", "BlockList", "ModelSpec", "lookup"]
