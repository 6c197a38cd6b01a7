"""Places of which one at a time can be taken: asked for both, a plan says no; the one asked for last takes over."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.options import short
from ..errors import IncompatibleError
from .levers import PLACES, RIVALS

Wishes = Mapping[str, object]


def settle(wishes: Wishes, overrides: Wishes) -> tuple[dict[str, object], list[str]]:
    """(the wishes with one of each pair of rivals, remarks for the plan).

    An override goes before what the preset says. IncompatibleError where both come from the same place.
    """
    settled, remarks = dict(wishes), []
    for key, rival in RIVALS.items():
        if not (settled.get(key) and settled.get(rival)):
            continue
        if bool(overrides.get(key)) == bool(overrides.get(rival)):
            raise IncompatibleError(
                f"{key}={short(wishes[key])} and {rival}={short(wishes[rival])}: both stand around the scheduler's "
                f"steps; give one of them, or {rival}=None"
            )
        last, other = (key, rival) if overrides.get(key) else (rival, key)
        settled, remark = without(settled, last, other)
        remarks += remark
    return settled, remarks


def exchanged(
    wishes: Wishes, key: str, value: str | bool | None, parameters: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """(the wishes with another value, or none, at one place; the remark about a rival that it takes the place of)."""
    place = PLACES[key]
    kept = {name: wish for name, wish in wishes.items() if name != key and not place.owns(name)}
    given = {place.prefix + name: wish for name, wish in parameters.items() if wish is not None}
    changed = {**kept, key: value, **given}
    return without(changed, key, RIVALS[key]) if value and key in RIVALS else (changed, [])


def without(wishes: Wishes, key: str, rival: str) -> tuple[dict[str, object], list[str]]:
    """(the wishes without those of `rival`, whose place `key` takes, the remark about that)."""
    before, value = wishes.get(rival), wishes.get(key)
    kept = {name: wish for name, wish in wishes.items() if name != rival and not PLACES[rival].owns(name)}
    if not before or not isinstance(before, (str, bool)) or not isinstance(value, (str, bool)):
        return dict(wishes), []
    return {**kept, rival: None}, [f"{PLACES[key].item(value)} took the place of {PLACES[rival].item(before)}"]
