"""What `bench` gives back: one document of plain data, its pictures, a table, a page, and a check against another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidOptionError
from .against import Change, changes
from .page import page, tables
from .rows import HEAD, align, floor_row, lead_rows, remarks, row


@dataclass(frozen=True)
class Result:
    """`document` is ready for JSON; `pictures` are [P, ...] in 0..1 by size and contender (none in a stored one)."""

    document: Mapping[str, Any]
    pictures: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(self.document)

    def contender(self, name: str, size: str | None = None) -> Mapping[str, Any]:
        """The figures of one contender, in the first bucket unless told."""
        for bucket in self.document["buckets"]:
            for one in bucket["contenders"] if size in (None, bucket["size"]) else ():
                if one["name"] == name:
                    found: Mapping[str, Any] = one
                    return found
        raise InvalidOptionError(f"no contender {name!r} was measured" + ("" if size is None else f" at {size}"))

    def against(self, stored: str | Path | Mapping[str, Any]) -> tuple[Change, ...]:
        """What changed since a stored document, regressions first; see `against.changes`."""
        before = stored if isinstance(stored, Mapping) else read(stored)
        return changes(before, self.document)

    def page(self) -> str:
        """One self-contained HTML page."""
        return page(self.document, self.pictures)

    def save(self, folder: str | Path) -> dict[str, str]:
        """Write bench.json and bench.html into a folder; {what: path}."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        files = {"json": place / "bench.json", "html": place / "bench.html"}
        files["json"].write_text(json.dumps(self.document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        files["html"].write_text(self.page(), encoding="utf-8")
        return {what: str(path) for what, path in files.items()}

    def __str__(self) -> str:
        told = self.document
        env = told["environment"]
        lines = [
            f"{told['pipeline']}, {told['dtype']}, {len(told['prompts'])} prompts, {told['rounds']} rounds of "
            f"A B B A, {told['level']:.0%} intervals; {env['device']}, torch {env['torch']}, {env['threads']} "
            f"threads, load {env['load']}" + (", CPU seconds" if told["clock"] == "cpu" else "")
        ]
        for bucket in told["buckets"]:
            rows = [row(one) for one in bucket["contenders"]]
            lines += ["", bucket["size"], *align([HEAD, *rows, floor_row(bucket)])]
            lines += [f"  {one['name']}: refused: {one['refused']}" for one in bucket["contenders"] if one["refused"]]
            lines += [f"  PSNR of {pair}: {lead}, paired by prompt" for pair, lead in lead_rows(bucket)]
            lines += list(remarks(bucket))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return tables(self.document)


def read(path: str | Path) -> Mapping[str, Any]:
    """A stored document. Raises InvalidOptionError where the file is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidOptionError(f"{path} is no JSON document: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("buckets"), list):
        raise InvalidOptionError(f"{path} was not written by `diffaccel bench`: it has no buckets")
    return found
