"""The worked examples of CONTRIBUTING.md run: files where their titles say, rows in the tables, and their tests."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from diffaccel.attention.sparse import registry
from diffaccel.core.place import Lever, Place
from diffaccel.core.slots import Slot
from diffaccel.planner import levers

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
MOST_LINES = 30
BLOCKS = re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
FILES = {title: code for title, code in BLOCKS if title.startswith("diffaccel/")}
TESTS = {title: code for title, code in BLOCKS if title.startswith("tests/")}
ROWS = {title: code for title, code in BLOCKS if title not in FILES and title not in TESTS}


def module_of(title: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file of a block, as the module it would be where its title says."""
    path = folder / title.replace("/", "_")
    path.write_text(BLOCKS_BY_TITLE[title])
    name = title.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


BLOCKS_BY_TITLE = dict(BLOCKS)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All files and rows of the page, for the length of a test."""
    for title in FILES:
        module_of(title, tmp_path, monkeypatch)
    known = {"Lever": Lever, "Place": Place, "Slot": Slot}
    for title, code in ROWS.items():
        value = eval(code, known)
        if " of " in title:
            table, where = re.fullmatch(r"row of ([\w.]+) in (\S+)\.py", title).groups()
            target = importlib.import_module(where.replace("/", "."))
            for part in table.split("."):
                target = getattr(target, part)
            for key, row in value.items():
                monkeypatch.setitem(target, key, row)
        else:
            name, where = re.fullmatch(r"(\w+) in (\S+)\.py", title).groups()
            monkeypatch.setattr(importlib.import_module(where.replace("/", ".")), name, value, raising=False)
    return tmp_path


def test_there_is_an_example_of_everything_and_none_is_long() -> None:
    assert re.findall(r"^## (A .*)$", PAGE, re.MULTILINE) == [
        "A gate", "A cache method", "A mask", "A family", "A lever",
    ]  # fmt: skip
    assert len(BLOCKS) == PAGE.count("```python")
    assert max(len(code.splitlines()) for _, code in BLOCKS) <= MOST_LINES


@pytest.mark.parametrize("title", sorted(TESTS))
def test_the_example_runs(title: str, added: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(title, added, monkeypatch)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_nothing_of_the_examples_stays() -> None:
    assert "near" not in registry.METHODS and "counting" not in levers.ROOMS
