"""What a row of docs/loading.md is: a way in which people load a pipeline, and what each lever does there.

Rows are plain descriptors. The page is written from them and `tests/loaded/test_cells.py` runs every cell of them, so
that the page says nothing that was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests import tiny

PLAN = "plan"  # refused or left out before anything is computed, with the sentence as the plan's reason
RUN = "run"  # on, but steps aside in every run of this row, with the sentence among the report's notes
WARNS = "warns"  # on, but taken off before the next run, with a warning: what was done later is in its way
RAISES = "raises"  # on, but the next run (of LoRAs: the next change) is refused after what was done later
LIBRARY = "library"  # the library's own error, the same with diffaccel and without it


@dataclass(frozen=True)
class Says:
    """A cell in which the lever does not act.

    Attributes:
        text: part of the sentence that is said, enough to be understood on the page.
        where: PLAN, RUN, WARNS, RAISES or LIBRARY.
    """

    text: str
    where: str = PLAN


@dataclass(frozen=True)
class Row:
    """A way of loading.

    Attributes:
        name: of the tests and of the page's first column; may hold Markdown.
        build: makes the pipeline; called anew for each cell.
        cells: by name of a column (`tests/loaded/columns.py`), what is said where the lever does not act; a column
            that is not among them acts.
        family: of `tests/tiny.py`, for the arguments of a call.
        run: (pipe, overrides of the call) -> the picture; None is `tiny.run` of the family.
        after: what is done to the pipeline once it is accelerated (an offload of another library, say).
        off: takes that off again, where an undo asks for it.
        needs: packages; a cell is skipped where one is missing.
        renewed: the library makes parameters anew in each call (so that their identity tells nothing).
        slow: left to `make test-all`.
        remark: printed below the table: what stands in for a library that does not run on a CPU, for instance.
    """

    name: str
    build: Callable[[], Any]
    cells: Mapping[str, Says] = field(default_factory=dict)
    family: str = "flux"
    run: Callable[..., Any] | None = None
    after: Callable[[Any], object] | None = None
    off: Callable[[Any], None] | None = None
    needs: tuple[str, ...] = ()
    renewed: bool = False
    slow: bool = True
    remark: str = ""

    def picture(self, pipe: Any, **overrides: Any) -> Any:
        """One deterministic call; its output tensor."""
        if self.run is not None:
            return self.run(pipe, **overrides)
        return tiny.run(pipe, self.family, **overrides)
