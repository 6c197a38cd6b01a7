"""The rooms of the package have an order, which docs/architecture.md shows: nobody imports upwards or in a circle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import rooms

ROOT = Path(__file__).parents[1]
NUMBERS = rooms.order((ROOT / "docs" / "architecture.md").read_text())
FOUND = rooms.imports(ROOT)

# (module, what it imports that does not lie below): to be mended; this list may only become shorter.
UPWARDS: set[tuple[str, str]] = set()


def test_the_table_of_rooms_is_complete() -> None:
    assert {rooms.room(name) for name in rooms.modules(ROOT)} == set(NUMBERS)


def test_no_room_imports_from_one_that_is_not_below() -> None:
    wrong = {(i.source, i.target) for i in rooms.upwards(FOUND, NUMBERS)}
    assert sorted(wrong - UPWARDS) == [], "move what is shared to a room below both"
    assert sorted(UPWARDS - wrong) == [], "mended: take it off the list"


def test_no_module_imports_itself_through_others() -> None:
    assert rooms.circles(FOUND) == []


def test_the_imports_of_this_package_are_seen() -> None:
    """What stands in the source today; were nothing seen, the tests above would pass as well."""
    seen = {(rooms.room(i.source), rooms.room(i.target)) for i in FOUND}
    assert {("caching", "core"), ("planner", "models"), ("handle", "planner"), ("cli", "testbed")} <= seen
    assert len(FOUND) > 1000


# ---- would it be caught? -------------------------------------------------------------------------------------------

ORDER = {"errors": 1, "core": 2, "caching": 3, "vae": 3, "planner": 4}


def package(folder: Path, files: dict[str, str]) -> list[rooms.Import]:
    for name, text in {"core/__init__": "", "caching/__init__": "", "vae/__init__": "", **files}.items():
        path = folder / "diffaccel" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return rooms.imports(folder)


@pytest.mark.parametrize(
    ("module", "text", "target"),
    [
        ("core/run", "from ..planner.plan import Plan", "planner.plan"),
        ("core/run", "from .. import planner", "planner"),
        ("core/run", "import diffaccel.planner.plan", "planner.plan"),
        ("core/run", "def late():\n    from ..planner import plan", "planner.plan"),
        ("core/run", "import importlib\nimportlib.import_module('..planner.plan', __package__)", "planner.plan"),
        ("core/run", "import importlib\nimportlib.import_module('diffaccel.planner')", "planner"),
        ("caching/engine", "from ..vae import tiles", "vae.tiles"),  # levers do not import one another
        ("vae/tiles", "class A:\n    def f(self):\n        from ..caching.engine import x", "caching.engine"),
    ],
)
def test_an_import_upwards_is_caught(tmp_path: Path, module: str, text: str, target: str) -> None:
    files = {"planner/__init__": "", "planner/plan": "", "caching/engine": "", "vae/tiles": "", "core/run": ""}
    [found] = rooms.upwards(package(tmp_path, files | {module: text}), ORDER)
    assert found.target == f"diffaccel.{target}"


@pytest.mark.parametrize(
    "text",
    [
        "from ..core import run",
        "from .engine import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..planner.plan import Plan",
        "import torch\nfrom collections.abc import Mapping",
    ],
)
def test_what_may_be_imported_is_not_caught(tmp_path: Path, text: str) -> None:
    files = {"planner/__init__": "", "planner/plan": "", "core/run": "", "caching/engine": "", "caching/guards": text}
    found = package(tmp_path, files)
    assert rooms.upwards(found, ORDER) == [] and rooms.circles(found) == []


def test_circles_are_caught_inside_a_room_and_through_three(tmp_path: Path) -> None:
    files = {
        "core/run": "def late():\n    from .stack import x",
        "core/stack": "from . import run",
        "caching/a": "from . import b",
        "caching/b": "from .c import x",
        "caching/c": "from ..caching import a",
    }
    assert rooms.circles(package(tmp_path, files)) == [
        ["diffaccel.caching.a", "diffaccel.caching.b", "diffaccel.caching.c"],
        ["diffaccel.core.run", "diffaccel.core.stack"],
    ]


def test_a_room_that_stands_twice_in_the_table_is_caught() -> None:
    row = "| 1 | `errors.py` | |\n"
    assert rooms.order(row + "| 2 | `core/`, `ledger/` | |\n") == {"errors": 1, "core": 2, "ledger": 2}
    with pytest.raises(AssertionError, match="errors stands twice"):
        rooms.order(row + row)
