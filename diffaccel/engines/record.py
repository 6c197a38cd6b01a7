"""What an engine takes, as data that was read from its sources, and commands that can say nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Record:
    """An engine's arguments: name -> {"takes": value, boolean or switch; "choices"; "source"}, as `data` has them."""

    data: Mapping[str, Any]

    @property
    def engine(self) -> str:
        """Its name."""
        return str(self.data["engine"])

    @property
    def version(self) -> str:
        """What was read, and when."""
        return f"{self.data['version']}, arguments recorded {self.data['recorded']}"

    @property
    def sources(self) -> tuple[str, ...]:
        """Repository, commit and what is there."""
        return tuple(f"{s['repository']}@{s['commit'][:8]}: {s['what']}" for s in self.data["sources"])


@cache
def record(engine: str) -> Record:
    """The record of this engine."""
    return Record(json.loads((files(__package__) / "records" / f"{engine}.json").read_text()))


class Command:
    """A command line of recorded arguments, in the order in which they are added.

    Raises:
        LookupError: an argument, a choice or a variable that is not recorded: a mistake of ours, never of users.
    """

    def __init__(self, recorded: Record, *words: str) -> None:
        self._record, self._words = recorded, [*recorded.data["program"], *words]
        self._arguments: list[tuple[str, ...]] = []
        self._environment: dict[str, str] = {}

    def add(self, flag: str, value: object = None) -> None:
        """One argument: a switch without a value, a boolean with true or false, else its value."""
        takes = self._record.data["arguments"][flag]
        if (value is None) != (takes["takes"] == "switch"):
            raise LookupError(f"{flag} takes {takes['takes']}, got {value!r}")
        if value not in takes.get("choices", (value,)):
            raise LookupError(f"{flag}={value!r}: {takes['choices']}")
        if value is None:
            self._arguments.append((flag,))
        else:
            self._arguments.append((flag, str(value).lower() if isinstance(value, bool) else plain(value)))

    def set(self, name: str, value: object) -> None:
        """One variable of the environment."""
        if name not in self._record.data["environment"]:
            raise LookupError(f"{name} is not recorded")
        self._environment[name] = str(value).lower() if isinstance(value, bool) else plain(value)

    def __str__(self) -> str:
        lines = [f"{name}={shlex.quote(value)}" for name, value in self._environment.items()]
        lines.append(" ".join(self._words))
        lines += ["  " + " ".join([flag, *map(shlex.quote, rest)]) for flag, *rest in self._arguments]
        return " \\\n".join(lines)


def plain(value: object) -> str:
    """Numbers as people write them, tables as JSON."""
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if isinstance(value, dict) else str(value)
