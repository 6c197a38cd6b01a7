"""Where the parts of the package meet, types are said: what diffusers leaves untyped has a name in core/compat.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "diffaccel"
UNTYPED = PACKAGE / "core" / "compat.py"
ROOMS = [path for room in ("core", "planner") for path in (PACKAGE / room).rglob("*.py")]
TYPED = sorted({*ROOMS, *(PACKAGE / f"{name}.py" for name in ("api", "handle", "pipeline"))} - {UNTYPED})


def any_lines(source: str) -> list[int]:
    """The lines that import or mention `typing.Any`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = _names_in(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
        else:
            names = [getattr(node, "id", ""), getattr(node, "attr", "")]
        if "Any" in names:
            found.add(getattr(node, "lineno", 0))
    return sorted(found)


def _names_in(text: str) -> list[str]:
    """The names in a type that stands in quotes."""
    try:
        return [node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)]
    except SyntaxError:
        return []


@pytest.mark.parametrize("path", TYPED, ids=[str(path.relative_to(PACKAGE)) for path in TYPED])
def test_no_any(path: Path) -> None:
    assert any_lines(path.read_text()) == [], (
        "name it in core/compat.py, or say what is asked of it in core/protocols.py"
    )


def test_any_would_be_seen() -> None:
    assert any_lines(UNTYPED.read_text())
    assert any_lines("from typing import Any\n\nx: dict[str, Any] = {}\n") == [1, 3]
    assert any_lines("import typing\n\ndef f(x: 'list[Any]') -> typing.Any: ...\n") == [3]
    assert any_lines("# Any\nx = any([])\n") == []
