"""Presets of other packages: the entry-point group `diffaccel.presets`.

A package announces one as `name = "package:path/to/file.toml"` (a file of the package), or as
`name = "package.module:callable"`, which returns the TOML text (a plain string will do as well). Nothing of another
package is imported until its preset is named, or all are listed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata, resources

from ...errors import InvalidOptionError

GROUP = "diffaccel.presets"


def entry_points() -> dict[str, metadata.EntryPoint]:
    """The announced presets by name; of two packages that take one name, the first on the path has it."""
    found: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found


def text(name: str) -> str:
    """The TOML text of an announced preset.

    Raises InvalidOptionError naming the preset, where it comes from and what went wrong.
    """
    entry = entry_points()[name]
    try:
        source = _read(entry)
    except Exception as error:  # a plug-in may fail in any way, and must not take us with it
        raise InvalidOptionError(f"{_where(entry)} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(source, str):
        raise InvalidOptionError(f"{_where(entry)} must be TOML text, got {type(source).__name__}")
    return source


def readable(parse: Callable[[str, str], object]) -> list[str]:
    """Names of the announced presets that load and parse; each other one is a warning that names it."""
    good = []
    for name in entry_points():
        try:
            parse(text(name), name)
            good.append(name)
        except InvalidOptionError as error:
            warnings.warn(f"diffaccel leaves out a preset: {error}", stacklevel=2)
    return good


def _where(entry: metadata.EntryPoint) -> str:
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    return f"preset {entry.name!r}{package} (entry point {entry.value!r})"


def _read(entry: metadata.EntryPoint) -> object:
    if entry.value.endswith(".toml"):
        package, _, path = entry.value.partition(":")
        return resources.files(package.strip()).joinpath(*path.strip().split("/")).read_text(encoding="utf-8")
    found = entry.load()
    return found() if callable(found) else found
