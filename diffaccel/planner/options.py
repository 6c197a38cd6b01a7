"""Wishes: the override keys of `accelerate`, validated against the table of places before anything is touched."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields

from ..core.accelerator import Accelerator, Fidelity
from ..core.options import above, plain, short, take, whole
from ..core.place import BALANCED, LEVELS, Place
from ..errors import InvalidOptionError, clipped, closest, nearest, unknown
from .levers import PLACES, owner_of

# What an option is called elsewhere, or in speech, by the name it has here (the first one that there is is meant).
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "backend": ("attention",),
    "cpu_offload": ("offload",),
    "max_memory": ("memory_gib", "device_bytes", "max_bytes", "budget"),
    "max_skip_steps": ("max_steps", "max_consecutive"),
    "memory": ("memory_gib", "device_bytes", "max_bytes", "budget"),
    "num_steps": ("steps", "min_steps"),
    "psnr": ("min_psnr_db",),
    "quality": ("level",),
    "rdt": ("threshold",),
    "rel_l1_thresh": ("threshold",),
    "residual_diff_threshold": ("threshold",),
    "schedule": ("steps", "steps_mask"),
    "steps_computation_mask": ("steps_mask", "steps"),
    "time": ("max_seconds",),
    "vram": ("memory_gib", "device_bytes", "max_bytes", "budget"),
    "warmup": ("warmup_steps",),
}
ARGUMENTS = ("budget", "hardware", "level", "preset", "strict")  # of `accelerate`, beside the options
LEVEL = "level"  # the wish of that name, beside those of the places
BUDGET_FIDELITIES = tuple(f.value for f in Fidelity)


@dataclass(frozen=True)
class Budget:
    """What a plan may spend.

    Attributes:
        memory_gib: peak memory of the device in GiB. BudgetError where the weights alone need more.
        min_psnr_db: PSNR in dB to the plain picture that nine pictures of ten are to reach. The adaptive cache keeps
            it, by the calibration of a tuned preset or else by the testbeds' table, against the same pipeline without
            it; other lossy items stay off without a measurement of their own.
        fidelity: the worst fidelity allowed: "exact", "equivalent" or "lossy".
        max_seconds: from the call to the last step; the adaptive cache takes the pace from the first computed steps.
        max_steps: computed steps of a loop, which the adaptive cache places.
    """

    memory_gib: float | None = None
    min_psnr_db: float | None = None
    fidelity: str = "lossy"
    max_seconds: float | None = None
    max_steps: int | None = None

    def __new__(cls, *given: object, **named: object) -> Budget:
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
        names, form = ("memory_gib", "min_psnr_db", "max_seconds"), "Budget({name}={value}): must be {allowed}"
        take(self, above(0).or_none(), *names, form=form)
        take(self, whole(3).or_none(), "max_steps", form=form)


def parameter_names(place: Place, value: str | bool | None) -> list[str]:
    """Names of the parameters a value of this place takes (without the prefix)."""
    lever = place.levers.get(str(value))
    return [] if lever is None else [f.name for f in fields(lever.config()) if f.name not in lever.fixed]


def wished(wishes: Mapping[str, object], key: str) -> str | bool:
    """The value that is asked for at a place; False where none is."""
    value = wishes.get(key)
    return value if isinstance(value, (str, bool)) else False


def override_keys() -> list[str]:
    """Every override key `accelerate` knows. Imports every lever: for messages only."""
    keys = set(PLACES)
    for place in PLACES.values():
        keys |= {place.prefix + name for value in place.levers for name in parameter_names(place, value)}
    return sorted(keys)


def validate(wishes: dict[str, object]) -> dict[str, object]:
    """The same wishes. Raises InvalidOptionError for unknown names and values."""
    for key, value in wishes.items():
        place = PLACES.get(key)
        if key == LEVEL:
            require_level(value)
        elif place is None:
            _require_known(key, wishes)
        elif value is not None and value is not False and not _allowed(place, value):
            allowed = [str(v) for v in (*place.values, None)]
            raise InvalidOptionError(f"{key}={short(value)}: {nearest(str(value), allowed)}")
    for key in wishes:
        owner = owner_of(key)
        if owner is not None and not wishes.get(owner.key):
            raise InvalidOptionError(f"{key} was given, but no {owner.key} is chosen: give {owner.key}= as well")
    return {key: plain(value) for key, value in wishes.items()}


def require_level(value: object) -> None:
    """Raise, with the nearest name, unless it is a level of the dial or None."""
    if value is not None and (not isinstance(value, str) or value not in LEVELS):
        raise InvalidOptionError(f"{LEVEL}={short(value)}: {nearest(str(value), LEVELS)}")


def level_of(wishes: Mapping[str, object]) -> str:
    """The level that is asked for; the middle one where none is."""
    value = wishes.get(LEVEL)
    return value if isinstance(value, str) else BALANCED


def by_level(key: str, wishes: Mapping[str, object]) -> dict[str, object]:
    """Override keys that the level sets at a place, with their values, whether they were given or not."""
    place = PLACES[key]
    lever = place.levers.get(str(wished(wishes, key)))
    return {} if lever is None else {place.prefix + k: v for k, v in lever.levels.get(level_of(wishes), {}).items()}


def _allowed(place: Place, value: object) -> bool:
    return isinstance(value, bool if place.switch else str) and value in place.values


def _require_known(key: str, wishes: dict[str, object]) -> None:
    """Raise unless some value of the place that this key belongs to has such a parameter."""
    owner = owner_of(key)
    chosen = owner is not None and wished(wishes, owner.key)
    if owner is not None and chosen and key.removeprefix(owner.prefix) in parameter_names(owner, chosen):
        return
    known = override_keys()
    if key not in known:
        raise _no_option(key, wishes, known)


def likely(name: str, names: Collection[str], prefix: str = "") -> list[str]:
    """The names that were likely meant, best first; `prefix` is that of all names."""
    other = [prefix + word for word in OTHER_WORDS.get(name.removeprefix(prefix), ()) if prefix + word in names]
    return (other[:1] + [near for near in closest(name, names) if near not in other[:1]])[:3]


def _no_option(key: str, wishes: dict[str, object], known: list[str]) -> InvalidOptionError:
    """The error for an option that there is not, with the near ones of its place."""
    owner = owner_of(key)
    if owner is None:
        return unknown("option", key, [*known, *ARGUMENTS], likely(key, [*known, *ARGUMENTS]))
    names = [owner.prefix + name for name in parameter_names(owner, wished(wishes, owner.key))]
    names = names or [name for name in known if owner.owns(name)]
    return unknown("option", key, names, likely(key, names, owner.prefix))


def require_parameters(key: str, value: str | bool, parameters: Iterable[str]) -> None:
    """Raise for a keyword that the verb of this value does not take, in the words of the verb."""
    names = parameter_names(PLACES[key], value)
    for name in parameters:
        if name not in names:
            raise unknown(f"option of {PLACES[key].item(value)}", name, names, likely(name, names))


def build(key: str, value: str | bool, wishes: dict[str, object]) -> Accelerator:
    """The accelerator config of one wish (the value must be one this version has)."""
    place = PLACES[key]
    lever = place.levers[str(value)]
    names = parameter_names(place, value)
    parameters: dict[str, object] = {}
    for wish, given in {**by_level(key, {**wishes, key: value}), **wishes}.items():
        if owner_of(wish) is place:
            name = wish.removeprefix(place.prefix)
            if name not in names:
                raise _no_option(wish, wishes, [])
            parameters[name] = given
    try:
        return lever.config()(**lever.fixed, **parameters)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{key}={value!r}: {error}") from None
