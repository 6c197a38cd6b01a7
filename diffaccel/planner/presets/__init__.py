"""Presets: named wishes, in commented TOML files beside this one and in packages of third parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypedDict, cast

from ...core.options import short
from ...errors import InvalidOptionError, unknown
from ...ledger.hardware import KINDS
from .. import toml
from ..options import BUDGET_FIDELITIES, require_level
from . import third_party

FORM = {
    "description": toml.TEXT,
    "families": toml.LIST,
    "hardware": toml.TEXT,
    "memory_gib": toml.NUMBER,
    "fidelity": toml.TEXT,
    "level": toml.TEXT,
    "wishes": toml.TABLE,
    "on": toml.TABLE,
    "published": toml.TABLE,
    # What `diffaccel tune` measured: the schedule, fewer steps where those beat it, its rivals, tolerances.
    "measured": toml.TABLE,
    "instead": toml.TABLE,
    "rivals": toml.TABLE,
    "calibration": toml.TABLE,
    "origin": toml.TABLE,
    "schedules": toml.LIST,
}
DEVICES = tuple(KINDS)
NEAR_GIB = 1.0  # memory that counts as the same: cards report a little less than is printed on them
ON_FORM = {"why": toml.TEXT, "wishes": toml.TABLE}
# Of others, by plan item: what was timed ("a forward"; the generation unless said), the pair, and where it stands.
PUBLISHED_FORM = {"gain": toml.NUMBER, "of": toml.TEXT, "what": toml.TEXT, "source": toml.TEXT}


class OnDevice(TypedDict, total=False):
    """What is different on one kind of device, and why."""

    why: str
    wishes: Mapping[str, object]


class PresetTable(TypedDict, total=False):
    """The text of a preset as plain data."""

    description: str
    families: Sequence[str]
    hardware: str
    memory_gib: float
    fidelity: str
    level: str
    wishes: Mapping[str, object]
    on: Mapping[str, OnDevice]
    published: Mapping[str, Mapping[str, object]]
    measured: Mapping[str, object]
    instead: Mapping[str, object]
    rivals: Mapping[str, object]
    calibration: Mapping[str, object]
    origin: Mapping[str, object]
    schedules: Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Preset:
    """Wishes and where they apply.

    `families` of None means any; `hardware` is the machine it was made for (on another one, a note says so), or
    `memory_gib` that of the cards it was made for;
    `fidelity` caps what may be enabled; `level` is that of the dial unless the user turns it; `on` changes wishes on
    one kind of device ("cpu", "cuda", ...), each with a reason; `notes` go into the plan. `published` are gains that
    others report, by plan item, with their source. Of a tuned preset,
    `measured` are its figures, `calibration` what tolerances of the adaptive cache came to, `schedules` the best
    known steps for every number of computed ones.
    """

    name: str
    wishes: dict[str, object] = field(default_factory=dict)
    description: str = ""
    families: tuple[str, ...] | None = None
    hardware: str | None = None
    memory_gib: float | None = None
    fidelity: str | None = None
    level: str | None = None
    on: Mapping[str, OnDevice] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    published: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    measured: Mapping[str, object] = field(default_factory=dict)
    calibration: Mapping[str, object] = field(default_factory=dict)
    schedules: tuple[Mapping[str, object], ...] = ()


def bundled() -> list[str]:
    """Names of the presets of this package, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


@cache
def _made_for() -> tuple[Preset, ...]:
    """The presets of this package that name families, and a machine or a memory."""
    found = map(load, bundled())
    return tuple(row for row in found if row.families and (row.hardware or row.memory_gib))


def made_for(family: str, machine: str | None, memory_gib: float | None) -> Preset | None:
    """The preset of this package for the family on this machine, else for cards of about this memory."""
    rows = [row for row in _made_for() if family in (row.families or ())]
    by_name = (row for row in rows if machine is not None and row.hardware == machine)
    by_memory = (row for row in rows if memory_gib and row.memory_gib and abs(row.memory_gib - memory_gib) <= NEAR_GIB)
    return next(by_name, None) or next(by_memory, None)


def names() -> list[str]:
    """Names of all presets, sorted. A third party's that cannot be read is left out, with a warning naming it."""
    return sorted({*bundled(), *third_party.readable(parse)})


def known(name: str) -> bool:
    """Is there a preset of that name? Loads none."""
    return name in bundled() or name in third_party.entry_points()


def text(name: str) -> str:
    """The text of a preset: a bundled one, else a third party's.

    Raises InvalidOptionError for an unknown name (with the nearest), and for a third party's that cannot be read.
    """
    if name in bundled():
        return (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
    if name in third_party.entry_points():
        return third_party.text(name)
    raise unknown("preset", name, names())


def load(name: str) -> Preset:
    """A preset by name, or one from a path to a TOML file."""
    path = Path(name)
    if name.endswith(".toml"):
        if not path.is_file():
            raise InvalidOptionError(f"preset={name!r}: there is no such file")
        return parse(path.read_text(encoding="utf-8"), path.stem)
    return parse(text(name), name)


def parse(source: str, name: str) -> Preset:
    """A preset from its text. Unknown keys raise with the nearest name."""
    found = toml.loads(source, f"preset {name!r}")
    _known(name, found, tuple(FORM))
    toml.require_kinds(f"preset {name!r}", found, FORM)
    data = cast(PresetTable, found)
    on = data.get("on", {})
    _known(name, on, DEVICES)
    for device, table in on.items():
        _known(name, table, tuple(ON_FORM))
        toml.require_kinds(f"preset {name!r}: on.{device}", table, ON_FORM)
    published = data.get("published", {})
    for item, row in published.items():
        _known(name, row, tuple(PUBLISHED_FORM))
        toml.require_kinds(f"preset {name!r}: published.{item}", row, PUBLISHED_FORM)
        if "gain" not in row or "source" not in row:
            raise InvalidOptionError(f"preset {name!r}: published.{item} needs a gain and its source")
    families, fidelity = data.get("families"), data.get("fidelity")
    if families is not None and not all(isinstance(family, str) for family in families):
        raise InvalidOptionError(f"preset {name!r}: families={short(families)} must hold names of families")
    if fidelity is not None and fidelity not in BUDGET_FIDELITIES:
        raise unknown(f"fidelity in preset {name!r}:", fidelity, BUDGET_FIDELITIES)
    try:
        require_level(data.get("level"))
    except InvalidOptionError as error:
        raise InvalidOptionError(f"preset {name!r}: {error}") from None
    return Preset(
        name=name,
        wishes=dict(data.get("wishes", {})),
        description=data.get("description", ""),
        families=tuple(families) if families is not None else None,
        hardware=data.get("hardware"),
        memory_gib=data.get("memory_gib"),
        fidelity=fidelity,
        level=data.get("level"),
        on=on,
        notes=_tuned(data),
        published=published,
        measured=data.get("measured", {}),
        calibration=data.get("calibration", {}),
        schedules=tuple(data.get("schedules", ())),
    )


def _tuned(data: PresetTable) -> tuple[str, ...]:
    """What a plan by a tuned preset should say: its figures, and what beat it."""
    instead = data.get("instead")
    told = [f"tuned: {data['description']}"] if data.get("measured") and data.get("description") else []
    if instead:
        told.append(
            f"where it was tuned, {instead.get('steps')} steps of the scheduler {instead.get('scheduler')!r} alone "
            f"were better than this schedule ({instead.get('psnr_db')} dB): take those, without a cache"
        )
    return tuple(told)


def _known(name: str, table: Mapping[str, object], allowed: tuple[str, ...]) -> None:
    if not isinstance(table, Mapping):
        raise InvalidOptionError(f"preset {name!r}: expected a table with {', '.join(allowed)}, got {table!r}")
    for key in table:
        if key not in allowed:
            raise unknown(f"key in preset {name!r}:", key, allowed)
