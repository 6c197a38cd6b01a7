"""Where the parts of the package meet, types are said: what diffusers leaves untyped has a name in core/compat.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "diffaccel"
UNTYPED = PACKAGE / "core" / "compat.py"
TYPED = sorted({*(PACKAGE / "core").rglob("*.py")} - {UNTYPED})


def any_lines(source: str) -> list[int]:
    """The lines that import or mention `typing.Any`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names = [node.value]  # an annotation in quotes
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
        else:
            names = [getattr(node, "id", ""), getattr(node, "attr", "")]
        if "Any" in names:
            found.add(getattr(node, "lineno", 0))
    return sorted(found)


@pytest.mark.parametrize("path", TYPED, ids=[str(path.relative_to(PACKAGE)) for path in TYPED])
def test_no_any(path: Path) -> None:
    assert any_lines(path.read_text()) == [], (
        "name it in core/compat.py, or say what is asked of it in core/protocols.py"
    )


def test_any_would_be_seen() -> None:
    assert any_lines(UNTYPED.read_text())
    assert any_lines("from typing import Any\n\nx: dict[str, Any] = {}\n") == [1, 3]
    assert any_lines("import typing\n\ndef f(x: 'Any') -> typing.Any: ...\n") == [3]
    assert any_lines("# Any\nx = any([])\n") == []
