"""Wishes: the override keys of `accelerate`, validated against the rule table before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..core.accelerator import Accelerator, Fidelity
from ..core.options import above, plain, take
from ..errors import InvalidOptionError, nearest, unknown
from .levers import LEVERS
from .places import PLACES, Place

BUDGET_FIDELITIES = tuple(f.value for f in Fidelity)


@dataclass(frozen=True)
class Budget:
    """What a plan may spend.

    Attributes:
        memory_gib: peak memory of the device in GiB. BudgetError where the weights alone need more.
        min_psnr_db: lossy items must have been measured at this PSNR or better; without a measurement they stay
            off.
        fidelity: the worst fidelity allowed: "exact", "equivalent" or "lossy".
        max_seconds: seconds per generation. This version has no time model, so it is listed as skipped.
    """

    memory_gib: float | None = None
    min_psnr_db: float | None = None
    fidelity: str = "lossy"
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.fidelity not in BUDGET_FIDELITIES:
            raise InvalidOptionError(
                f"Budget(fidelity={self.fidelity!r}): {nearest(str(self.fidelity), BUDGET_FIDELITIES)}"
            )
        names = ("memory_gib", "min_psnr_db", "max_seconds")
        take(self, above(0).or_none(), *names, form="Budget({name}={value}): must be {allowed}")


def parameter_names(place: Place, value: str | bool | None) -> list[str]:
    """Names of the parameters a value of this place takes (without the prefix)."""
    row = LEVERS.get(place.key, {}).get(str(value))
    if row is None or value not in place.ready:
        return []
    return [f.name for f in fields(row.config()) if f.name not in row.fixed]


def override_keys() -> list[str]:
    """Every override key `accelerate` knows."""
    keys = list(PLACES)
    for place in PLACES.values():
        for prefix in place.prefixes:
            for value in place.ready:
                keys += [prefix + name for name in parameter_names(place, value)]
    return sorted(set(keys))


def validate(wishes: dict[str, Any]) -> dict[str, Any]:
    """The same wishes, in the order of the table. Raises InvalidOptionError for unknown names and values."""
    known = override_keys()
    for key, value in wishes.items():
        place = PLACES.get(key)
        if place is None:
            if _owner(key) is None or (key not in known and _owner_is_ready(key, wishes)):
                raise unknown("option", key, known)
            continue
        if value is None or (isinstance(value, bool) and value in place.values) or value is False:
            continue
        if not isinstance(value, (str, bool)) or value not in place.values:
            allowed = [repr(v) for v in place.values] + ["None"]
            raise InvalidOptionError(f"{key}={value!r}: {nearest(str(value), allowed)}")
    for key in wishes:
        owner = _owner(key)
        if owner is not None and not wishes.get(owner.key):
            raise InvalidOptionError(f"{key} was given, but no {owner.key} is chosen: give {owner.key}= as well")
    return {key: plain(value) for key, value in wishes.items()}


def _owner(key: str) -> Place | None:
    """The place a parameter key belongs to (`cache_threshold` -> cache)."""
    return next((p for p in PLACES.values() for prefix in p.prefixes if key.startswith(prefix)), None)


def _owner_is_ready(key: str, wishes: dict[str, Any]) -> bool:
    owner = _owner(key)
    if owner is None:
        return False
    value = wishes.get(owner.key)
    return value is None or value in owner.ready


def build(key: str, value: str | bool, wishes: dict[str, Any]) -> Accelerator:
    """The accelerator config of one wish (the value must be one this version has)."""
    place = PLACES[key]
    row = LEVERS[key][str(value)]
    names = parameter_names(place, value)
    parameters = {}
    for wish, given in wishes.items():
        for prefix in place.prefixes:
            if wish.startswith(prefix):
                name = wish.removeprefix(prefix)
                if name not in names:
                    raise unknown("option", wish, [prefix + n for n in names])
                parameters[name] = given
    try:
        return row.config()(**row.fixed, **parameters)  # type: ignore[no-any-return]
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{key}={value!r}: {error}") from None
