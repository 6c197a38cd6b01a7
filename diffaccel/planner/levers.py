"""Order and conflicts, as one table: the places of all rooms, and a short list of rules. Never pair by pair."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..core.place import Place

# Place -> where its table stands. A room's table is loaded when one of its places is first asked about.
ROOMS = {
    "fusion": ("compilation.levers", "FUSION"),
    "quantization": ("quantization.levers", "PLACE"),
    "lora": ("quantization.levers", "LORA"),
    "compile": ("compilation.levers", "PLACE"),
    "offload": ("offload.levers", "PLACE"),
    "vae_tiling": ("vae.levers", "PLACE"),
    "attention": ("attention.levers", "PLACE"),
    "guidance": ("guidance.levers", "PLACE"),
    "cache": ("caching.levers", "PLACE"),
    "solver": ("solvers.levers", "PLACE"),
}


class _Places(Mapping[str, Place]):
    """Override key -> place."""

    def __init__(self) -> None:
        self._known: dict[str, Place] = {}

    def __getitem__(self, key: str) -> Place:
        if key not in self._known:
            module, name = ROOMS[key]
            self._known[key] = getattr(importlib.import_module(f"diffaccel.{module}"), name)
        return self._known[key]

    def __contains__(self, key: object) -> bool:
        return key in ROOMS

    def __iter__(self) -> Iterator[str]:
        return iter(ROOMS)

    def __len__(self) -> int:
        return len(ROOMS)


PLACES: Mapping[str, Place] = _Places()


def owner_of(key: str) -> Place | None:
    """The place whose parameter this override key is (`cache_threshold` -> cache); None for a place's own key."""
    if key in ROOMS:
        return None
    found = next((name for name in ROOMS if key.startswith(f"{name}_")), None)
    return PLACES[found] if found is not None and PLACES[found].owns(key) else None


# Places of which one at a time can be taken: both stand around the scheduler's steps.
RIVALS: Mapping[str, str] = {"cache": "solver", "solver": "cache"}


@dataclass(frozen=True)
class Rule:
    """What a plan remarks where `value` of `key` (with these parameters) is on and `place` is not.

    A rule switches nothing on: what is on is what was asked for. `gains` are the devices on which it is true.
    """

    key: str
    value: str | bool
    place: str
    remark: str
    parameters: tuple[tuple[str, tuple[object, ...]], ...] = ()  # (parameter, values for which the rule holds)
    gains: tuple[str, ...] = ("cpu", "cuda")

    def holds(self, wishes: Mapping[str, object], device: str) -> bool:
        """Does the rule speak about these wishes on this kind of device?"""
        named = wishes.get(self.key) == self.value and device in self.gains
        without = wishes.get(self.place) in (None, False)
        return named and without and all(wishes.get(name, values[0]) in values for name, values in self.parameters)


RULES: tuple[Rule, ...] = (
    Rule(
        "quantization",
        "int8",
        "compile",
        "INT8 dynamic without compile: run eagerly, quantizing and rescaling cost more than the products save",
        (("quantization_scheme", ("dynamic",)),),
        gains=("cuda", "cpu with INT8 units"),
    ),
)


def in_order(keys: Iterable[str]) -> list[str]:
    """Places in the order in which they are attached."""
    return sorted(keys, key=lambda key: PLACES[key].rank)
