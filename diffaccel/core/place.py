"""What a place of a pipeline is: something that only one lever can hold, with its values and their order.

Plain data. Each room of levers has one table of its own (`ROOM/levers.py`); `planner/levers.py` puts them together.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from .slots import Fidelity, Slot

if TYPE_CHECKING:
    from .accelerator import Accelerator

Rank = tuple[int, int]  # where an edit stands: its slot, then its place's order within the slot; smaller lies deeper
LAST: Rank = (99, 0)  # outside of every lever
BALANCED = "balanced"
LEVELS = ("careful", BALANCED, "fast")  # of the one dial, from the nearest picture to the shortest time


class ConfigClass(Protocol):
    """The config class of a lever: a frozen dataclass whose instances are accelerators."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    __name__: str
    fidelity: Fidelity

    def __call__(self, **parameters: object) -> Accelerator:
        """A config of these values. Raises InvalidOptionError for one that is not allowed."""


@dataclass(frozen=True)
class Lever:
    """Where the config class of a value lives (imported when first asked for), the fields that the value fixes, and
    the fields that a level of the dial sets, by level."""

    module: str  # below diffaccel: "offload.stage.config"
    name: str
    fixed: Mapping[str, object] = field(default_factory=dict)
    levels: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def config(self) -> ConfigClass:
        """The class."""
        found: ConfigClass = getattr(importlib.import_module(f"diffaccel.{self.module}"), self.name)
        return found


@dataclass(frozen=True)
class Place:
    """An exclusive place of a pipeline: one of `values` at a time.

    Attributes:
        key: the override key of `accelerate`.
        slot, order: the slot gives the order (WEIGHT, MODULE, CALL), `order` the order within it: later ones lie
            outside, and caches outermost, so that a skipped block's weights are never moved.
        levers: override value (as text; "True" for a switch) -> its config class.
        prefix: what the override keys of its parameters begin with (`cache_threshold` -> threshold); "" for none.
        switch: the value is True or False.
        item_name: the plan item's name, where all values share one; else it is `key.VALUE`.
    """

    key: str
    slot: Slot
    order: int
    levers: Mapping[str, Lever]
    prefix: str = ""
    switch: bool = False
    item_name: str = ""

    @property
    def values(self) -> tuple[str | bool, ...]:
        """The override values."""
        return (True, False) if self.switch else tuple(self.levers)

    @property
    def ready(self) -> tuple[str | bool, ...]:
        """Those that this version can attach."""
        return (*([True] if self.levers else []), False) if self.switch else tuple(self.levers)

    @property
    def rank(self) -> Rank:
        """Where its edits stand."""
        return list(Slot).index(self.slot), self.order

    def item(self, value: str | bool) -> str:
        """Plan item name of a value: `cache.first_block`; a switch has the bare name of its place."""
        return self.item_name or (self.key if isinstance(value, bool) else f"{self.key}.{value}")

    def owns(self, key: str) -> bool:
        """Is this override key one of its parameters?"""
        return bool(self.prefix) and key.startswith(self.prefix)
