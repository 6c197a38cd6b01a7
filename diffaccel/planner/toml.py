"""TOML for plans and presets: read with the standard library, written by the few lines below."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from ..core.options import short
from ..errors import InvalidOptionError

# Kinds of values, and what a refusal calls them.
TEXT, LIST, TABLE, NUMBER = (str,), (list, tuple), (Mapping,), (int, float)
_WORDS: dict[tuple[type, ...], str] = {
    TEXT: "text",
    LIST: "a list",
    TABLE: "a table of names and values",
    NUMBER: "a number",
}


def loads(text: str, origin: str) -> dict[str, object]:
    """Parse TOML; `origin` names the source in the error."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidOptionError(f"{origin} is not valid TOML: {error}") from error


def require_kinds(what: str, table: Mapping[str, object], kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Raise InvalidOptionError where a value that is there is not of the kind (TEXT, LIST, TABLE) its key asks for."""
    for key, kind in kinds.items():
        value = table.get(key)
        if value is not None and not isinstance(value, kind):
            got = type(value).__name__
            raise InvalidOptionError(f"{what}: {key}={short(value)} must be {_WORDS[kind]}, got {got}")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    raise InvalidOptionError(f"cannot write {value!r} ({type(value).__name__}) as TOML")


def dumps(data: Mapping[str, object]) -> str:
    """Write a plain dict: scalars first, lists of dicts as arrays of tables. None is left out."""
    lines = [f"{k} = {_value(v)}" for k, v in data.items() if v is not None and not _is_tables(v)]
    for key, tables in data.items():
        if _is_tables(tables):
            for table in tables:
                lines += ["", f"[[{key}]]"]
                lines += [f"{k} = {_value(v)}" for k, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def _is_tables(value: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, dict) for v in value)
