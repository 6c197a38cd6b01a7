"""Every cell of docs/loading.md: the lever acts and is undone bit by bit, or says its sentence and changes nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from diffaccel import accelerate, attach, plan, restore
from diffaccel.errors import DiffaccelError, IncompatibleError
from tests.loaded.columns import BY_NAME, COLUMNS, FREE, Column
from tests.loaded.row import LIBRARY, PLAN, RAISES, RUN, WARNS, Row
from tests.loaded.rows import ROWS
from tests.loaded.state import changes, describe, state_of
from tests.quantization.loras import state_dict

CELLS = [
    pytest.param(
        row,
        column,
        id=f"{row.name}-{column.name}".replace("`", ""),
        marks=[pytest.mark.slow] if row.slow or column.name == "compile" else [],
    )
    for row in ROWS
    for column in COLUMNS
]


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_a_cell(row: Row, column: Column, tmp_path: Path) -> None:
    for package in row.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'diffaccel[loaded]'")
    if column.name == "compile":
        torch.compiler.reset()
    cell = Cell(row, column, tmp_path)
    if column.name in ("lora", "save"):
        getattr(cell, column.name)()
    elif column.name in row.cells and row.cells[column.name].where == PLAN:
        cell.refused()
    else:
        cell.acts()


class Cell:
    """One lever on one way of loading."""

    def __init__(self, row: Row, column: Column, folder: Path) -> None:
        self.row, self.folder = row, folder
        self.says = row.cells.get(column.name)
        self.column = column
        self.call = dict(column.call.get(row.family, {}))
        self.options = dict(column.options)
        if "offload" in self.options:
            self.options["offload_folder"] = str(folder)
        self.pipe = row.build()
        self.plain = self.picture(self.pipe)
        self.before = state_of(self.pipe)
        self.other = self.pipe
        if row.after is not None:  # what is done later may change the picture: the truth has it too
            self.other = row.build()
            row.after(self.other)
            self.plain = self.picture(self.other)

    def picture(self, pipe: Any) -> torch.Tensor:
        found: torch.Tensor = self.row.picture(pipe, **self.call)
        return found.clone()

    def acts(self) -> None:
        """The lever changes what it is to change, twice alike, and leaves nothing behind."""
        pipe = accelerate(self.pipe, None, strict=True, **self.options)
        if self.row.after is not None:
            self.row.after(pipe)
        if self.says is not None and self.says.where == RAISES:
            with pytest.raises(DiffaccelError) as raised:
                self.picture(pipe)
            assert self.says.text in str(raised.value) and len(str(raised.value)) <= 300
            return self.undone()
        if self.says is not None and self.says.where == WARNS:
            with pytest.warns(UserWarning, match=re.escape(self.says.text)):
                first = self.picture(pipe)
            assert first.equal(self.plain)
            return self.undone()
        first, second = self.picture(pipe), self.picture(pipe)
        assert first.equal(second) or self.column.name == "compile"
        if self.says is not None:
            assert self.says.where == RUN
            assert any(self.says.text in note for note in pipe.acceleration.report.notes)
            assert second.equal(self.plain)
        else:
            assert self.column.acted is not None and self.column.acted(pipe, self.plain, second)
            assert second.equal(self.plain) or not self.column.exact
        return self.undone()

    def undone(self) -> None:
        """The picture and every weight are those from before."""
        try:
            restore(self.pipe)
        except IncompatibleError as error:  # a refusal that says the way out
            assert self.row.off is not None and "Take that off first" in str(error)
            self.row.off(self.pipe)
            restore(self.pipe)
        assert self.picture(self.pipe).equal(self.plain)
        if self.row.after is None:
            assert self.changed() == []

    def refused(self) -> None:
        """The plan says the sentence, strict raises it, and nothing has changed."""
        assert self.says is not None
        decision = plan(self.pipe, None, **self.options)
        item = decision.item(self.column.item)
        assert item.status != "enabled" and self.says.text in item.reason, item.reason
        with pytest.raises(DiffaccelError) as raised:
            accelerate(self.pipe, None, strict=True, **self.options)
        assert self.says.text in str(raised.value) and len(str(raised.value)) <= 300
        assert self.changed() == []
        assert self.picture(self.pipe).equal(self.plain)

    def changed(self) -> list[str]:
        """Names of what is not what it was."""
        before, after = self.before, state_of(self.pipe)
        if self.row.renewed:
            before, after = ({key: _unnamed(value) for key, value in one.items()} for one in (before, after))
        return changes(before, after)

    def lora(self) -> None:
        """Strengths are absolute, and unloading is exact."""
        state = state_dict(self.pipe, self.row.family)
        pipe = attach(self.pipe)
        later = self.says is not None and self.says.where == RAISES
        if later and self.row.after is not None:
            pipe.acceleration.loras.load(state, "a", 0.5)
            self.row.after(pipe)
            assert not self.picture(pipe).equal(self.plain)
        if self.says is not None:
            with pytest.raises(DiffaccelError) as raised:
                pipe.acceleration.loras.load(state, "b" if later else "a", 0.5)
            assert self.says.text in str(raised.value) and len(str(raised.value)) <= 300
            return self.undone()
        pipe.acceleration.loras.load(state, "a", 0.5)
        if self.row.after is not None:
            self.row.after(pipe)
        half = self.picture(pipe)
        pipe.acceleration.loras.set({"a": 1.0})
        whole = self.picture(pipe)
        assert not half.equal(self.plain) and not whole.equal(half)
        pipe.acceleration.loras.set({"a": 0.5})
        assert self.picture(pipe).equal(half)
        pipe.acceleration.loras.unload("a")
        assert self.picture(pipe).equal(self.plain)
        return self.undone()

    def save(self) -> None:
        """The files are those that the pipeline wrote before, or the library refuses both alike."""
        before = self._saved(self.other)  # (no run follows: bitsandbytes' 4-bit layers do not survive both)
        accelerate(self.pipe, None, strict=True, cache="schedule", cache_steps=[0, 1, 3], **FREE)
        if self.row.after is not None:
            self.row.after(self.pipe)
        found = self._saved(self.pipe)
        assert found == before
        restore(self.pipe)
        if self.says is not None:
            assert self.says.where == LIBRARY and self.says.text in found
        else:
            assert isinstance(found, dict) and len(found) > 3

    def _saved(self, pipe: Any) -> Any:
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        try:
            pipe.save_pretrained(str(folder))  # modular pipelines take no Path
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return {str(file.relative_to(folder)): content(file, folder) for file in sorted(folder.rglob("*.*"))}


def _unnamed(value: Any) -> Any:
    """The same without the identity of the tensor."""
    return value[1:] if isinstance(value, tuple) else value


def content(file: Path, folder: Path) -> Any:
    """What a file holds (modular pipelines write down the folder, which is left out); of a safetensors file its
    tensors and notes, whatever their order."""
    if file.suffix != ".safetensors":
        return hashlib.sha256(file.read_bytes().replace(str(folder).encode(), b"")).hexdigest()
    with safe_open(file, "pt") as opened:
        tensors = {name: describe(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
        return tensors, dict(opened.metadata() or {})


def test_every_sentence_belongs_to_a_column() -> None:
    assert {name for row in ROWS for name in row.cells} <= set(BY_NAME)
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_figures() -> None:
    """A cache of the denoiser's scope acts in every row, and every cell that does not act says a sentence."""
    assert not [row.name for row in ROWS if "schedule" in row.cells]
    sentences = [says.text for row in ROWS for says in row.cells.values()]
    assert all(len(text.split()) >= 4 for text in sentences), sentences
    assert {says.where for row in ROWS for says in row.cells.values()} <= {PLAN, RUN, WARNS, RAISES, LIBRARY}
