"""Each notebook is a py:percent text and an .ipynb without outputs that say the same.

That they run is tested by `pytest --nbmake notebooks`, which `make test` does.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jupytext
import pytest
from jupytext.compare import NotebookDifference, compare_notebooks

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str, suffix: str) -> Any:
    """One side of a pair."""
    return jupytext.read(FOLDER / (name + suffix))


def codes(notebook: Any) -> list[Any]:
    """The code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_has_both_sides() -> None:
    assert sorted(path.stem for path in FOLDER.glob("[0-9]*.py")) == NAMES
    assert "01_quickstart" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_pair_agrees(name: str) -> None:
    """Same cells, same tags; where this fails, `jupytext --sync notebooks/NAME.py` brings them together."""
    book, text = read(name, ".ipynb"), read(name, ".py")
    assert book.metadata["jupytext"]["formats"] == text.metadata["jupytext"]["formats"] == "ipynb,py:percent"
    compare_notebooks(book, text, fmt="py:percent", allow_expected_differences=False)
    codes(text)[-1].source += "\n1"
    with pytest.raises(NotebookDifference):  # the comparison is not blind
        compare_notebooks(book, text, fmt="py:percent", allow_expected_differences=False)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stripped(name: str) -> None:
    cells = codes(read(name, ".ipynb"))
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_code_cell_holds_the_parameters(name: str) -> None:
    """It assigns names in capitals and nothing else, and what the tests put in their place are those names."""
    first, *rest = codes(read(name, ".ipynb"))
    assert first.metadata["tags"] == ["parameters"]
    assert not any("parameters" in cell.metadata.get("tags", ()) for cell in rest)
    found = []
    for statement in ast.parse(first.source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)
        found += [target.id for target in statement.targets if isinstance(target, ast.Name)]
    assert found and all(parameter.isupper() for parameter in found)
    assert set(first.metadata["nbmake"]["mock"]) <= set(found)


def test_the_parameters_of_the_quickstart() -> None:
    source = codes(read("01_quickstart", ".py"))[0].source
    assert [line.split(" = ")[0] for line in source.splitlines()] == ["STEPS", "SIZE", "N_PROMPTS", "PRESET"]
