"""Presets: named wishes, in commented TOML files beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ...errors import InvalidOptionError, unknown
from .. import toml

KEYS = ("description", "families", "fidelity", "wishes")


@dataclass(frozen=True)
class Preset:
    """Wishes and where they apply. `families` of None means any; `fidelity` caps what may be enabled."""

    name: str
    wishes: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    families: tuple[str, ...] | None = None
    fidelity: str | None = None


def names() -> list[str]:
    """Names of the bundled presets, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def text(name: str) -> str:
    """The text of a bundled preset."""
    if name not in names():
        raise unknown("preset", name, names())
    return (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")


def load(name: str) -> Preset:
    """A bundled preset by name, or one from a path to a TOML file."""
    path = Path(name)
    if name.endswith(".toml"):
        if not path.is_file():
            raise InvalidOptionError(f"preset={name!r}: there is no such file")
        return parse(path.read_text(encoding="utf-8"), path.stem)
    return parse(text(name), name)


def parse(source: str, name: str) -> Preset:
    """A preset from its text. Unknown keys raise with the nearest name."""
    data = toml.loads(source, f"preset {name!r}")
    for key in data:
        if key not in KEYS:
            raise unknown(f"key in preset {name!r}:", key, KEYS)
    families = data.get("families")
    return Preset(
        name=name,
        wishes=dict(data.get("wishes", {})),
        description=data.get("description", ""),
        families=tuple(families) if families is not None else None,
        fidelity=data.get("fidelity"),
    )
