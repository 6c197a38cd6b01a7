"""Wishes: the override keys of `accelerate`, validated against the rule table before anything is touched."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

from ..core.accelerator import Accelerator, Fidelity
from ..core.options import above, plain, short, take
from ..errors import InvalidOptionError, clipped, closest, nearest, unknown
from .levers import LEVERS
from .places import PLACES, Place

# What an option is called elsewhere, or in speech, by the name it has here (the first one that there is is meant).
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "backend": ("attention",),
    "cpu_offload": ("offload",),
    "max_memory": ("memory_gib", "device_bytes", "max_bytes", "budget"),
    "max_skip_steps": ("max_steps", "max_consecutive"),
    "memory": ("memory_gib", "device_bytes", "max_bytes", "budget"),
    "num_steps": ("steps", "min_steps"),
    "psnr": ("min_psnr_db",),
    "rdt": ("threshold",),
    "rel_l1_thresh": ("threshold",),
    "residual_diff_threshold": ("threshold",),
    "schedule": ("steps", "steps_mask"),
    "steps_computation_mask": ("steps_mask", "steps"),
    "time": ("max_seconds",),
    "vram": ("memory_gib", "device_bytes", "max_bytes", "budget"),
    "warmup": ("warmup_steps",),
}
ARGUMENTS = ("budget", "hardware", "preset", "strict")  # of `accelerate`, beside the options
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

    def __new__(cls, *given: Any, **named: Any) -> Budget:
        """Refuses names that there are not in a sentence, where Python would say less."""
        names = [field.name for field in fields(cls)]
        for name, value in named.items():
            if name not in names:
                near = likely(name, names)
                example = f": write Budget({near[0]}={short(value)})" if near else f". Allowed: {', '.join(names)}"
                raise InvalidOptionError(f"Budget takes no {clipped(name)!r}{example}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.fidelity not in BUDGET_FIDELITIES:
            near = nearest(str(self.fidelity), BUDGET_FIDELITIES)
            raise InvalidOptionError(f"Budget(fidelity={short(self.fidelity)}): {near}")
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
                raise _no_option(key, wishes, known)
            continue
        if value is None or (isinstance(value, bool) and value in place.values) or value is False:
            continue
        if not isinstance(value, (str, bool)) or value not in place.values:
            allowed = [str(v) for v in (*place.values, None)]
            raise InvalidOptionError(f"{key}={short(value)}: {nearest(str(value), allowed)}")
    for key in wishes:
        owner = _owner(key)
        if owner is not None and not wishes.get(owner.key):
            raise InvalidOptionError(f"{key} was given, but no {owner.key} is chosen: give {owner.key}= as well")
    return {key: plain(value) for key, value in wishes.items()}


def _owner(key: str) -> Place | None:
    """The place a parameter key belongs to (`cache_threshold` -> cache)."""
    return next((p for p in PLACES.values() for prefix in p.prefixes if key.startswith(prefix)), None)


def likely(name: str, names: Collection[str], prefix: str = "") -> list[str]:
    """The names that were likely meant, best first; `prefix` is that of all names."""
    other = [prefix + word for word in OTHER_WORDS.get(name.removeprefix(prefix), ()) if prefix + word in names]
    return (other[:1] + [near for near in closest(name, names) if near not in other[:1]])[:3]


def _no_option(key: str, wishes: dict[str, Any], known: list[str]) -> InvalidOptionError:
    """The error for an option that there is not, with the near ones of its place."""
    owner = _owner(key)
    if owner is None:
        return unknown("option", key, [*known, *ARGUMENTS], likely(key, [*known, *ARGUMENTS]))
    prefix = next(p for p in owner.prefixes if key.startswith(p))
    value = wishes.get(owner.key)
    names = [prefix + name for name in parameter_names(owner, value)] or [k for k in known if k.startswith(prefix)]
    return unknown("option", key, names, likely(key, names, prefix))


def require_parameters(key: str, value: str | bool, parameters: Iterable[str]) -> None:
    """Raise for a keyword that the verb of this value does not take, in the words of the verb."""
    names = parameter_names(PLACES[key], value)
    for name in parameters:
        if name not in names:
            raise unknown(f"option of {PLACES[key].item(value)}", name, names, likely(name, names))


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
                    raise _no_option(wish, wishes, [])
                parameters[name] = given
    try:
        return row.config()(**row.fixed, **parameters)  # type: ignore[no-any-return]
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{key}={value!r}: {error}") from None
