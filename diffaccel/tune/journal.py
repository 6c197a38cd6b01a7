"""What a search has found so far, in a JSON file, a row at a time: stopped anywhere, it goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidOptionError


class Journal:
    """Rows by key. `path` None: kept in memory alone.

    `heading` says what the search is about (pipeline, call, prompts, seeds); a file of another search is refused.
    """

    def __init__(self, path: Path | None, heading: Mapping[str, Any]) -> None:
        self.path, self.heading = path, json.loads(json.dumps(heading))
        self.rows: dict[str, Any] = {}
        if path is not None and path.is_file():
            self.rows = self._read(path)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            heading, rows = found["heading"], dict(found["rows"])
        except (ValueError, KeyError, TypeError):
            raise InvalidOptionError(f"journal={str(path)!r} is not a journal of a search: remove it") from None
        for name, value in self.heading.items():
            if heading.get(name) != value:
                raise InvalidOptionError(
                    f"journal={str(path)!r} is of a search with another {name}: remove it, or name another file"
                )
        return rows

    def add(self, key: str, row: Any) -> None:
        """Keep a row; the file is whole at any time."""
        self.rows[key] = row
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps({"heading": self.heading, "rows": self.rows}, allow_nan=False) + "\n", "utf-8")
        os.replace(fresh, self.path)
