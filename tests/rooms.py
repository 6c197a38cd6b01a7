"""Who imports whom at run time, read off the source of the package; imports inside functions count as well."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "diffaccel"


@dataclass(frozen=True)
class Import:
    """Module `source` imports module `target` at line `line`."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module below `root` / diffaccel."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> list[Import]:
    """Every import of one module of the package by another that happens at run time."""
    known = modules(root)
    out = []
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        hints = {id(node) for block in ast.walk(tree) if _for_type_checkers(block) for node in ast.walk(block)}
        for node in ast.walk(tree):
            if id(node) not in hints:
                out += [
                    Import(name, target, node.lineno) for target in _targets(node, package, known) if target != name
                ]
    return out


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _targets(node: ast.AST, package: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of the package that a statement imports; a name of a package is its submodule where there is one."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = _absolute("." * node.level + (node.module or ""), package)
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        text = node.args[0]
        names = [_absolute(text.value, package)] if isinstance(text, ast.Constant) else []
    else:
        return
    yield from (name for name in names if name in known)


def _absolute(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([name[level:]] if name[level:] else [])])


def room(module: str) -> str:
    """The first part of a module's name below the package; `__init__` is the package's own."""
    return module.split(".")[1] if "." in module else "__init__"


def order(page: str) -> dict[str, int]:
    """The table of rooms in docs/architecture.md: room -> its number, from rows such as "| 4 | `models` | ... |"."""
    rows = re.findall(r"^\| (\d+) \| ((?:`[\w]+(?:\.py|/)?`(?:, )?)+) \|", page, re.MULTILINE)
    out = {}
    for number, names in rows:
        for name in re.findall(r"`(\w+)(?:\.py|/)?`", names):
            assert name not in out, f"{name} stands twice in the table of rooms"
            out[name] = int(number)
    return out


def upwards(found: list[Import], numbers: Mapping[str, int]) -> list[Import]:
    """Imports of a room that does not lie below; between rooms of one number none is allowed either way."""
    return [
        i for i in found if room(i.source) != room(i.target) and numbers[room(i.target)] >= numbers[room(i.source)]
    ]


def circles(found: list[Import]) -> list[list[str]]:
    """Groups of modules each of which imports, through others, itself (strongly connected, more than one)."""
    edges: dict[str, set[str]] = {}
    for one in found:
        edges.setdefault(one.source, set()).add(one.target)
        edges.setdefault(one.target, set())
    reach = {name: _reached(name, edges) for name in edges}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in edges}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in edges[todo.pop()] - seen:
            seen.add(target)
            todo.append(target)
    return seen
