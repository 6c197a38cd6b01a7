"""All rows of docs/loading.md, group by group. A new group is a module with a `ROWS`, and a line here."""

from __future__ import annotations

from tests.loaded import control, hooked, modular, quantized, wrapped
from tests.loaded.row import Row

GROUPS: dict[str, tuple[Row, ...]] = {
    "Weights, as they came": quantized.ROWS,
    "Modular pipelines": modular.ROWS,
    "Wrapped denoisers": wrapped.ROWS,
    "Compiled by others": wrapped.COMPILED,
    "Device maps, hooks of accelerate and diffusers": hooked.ROWS,
    "Control and references": control.ROWS,
}
ROWS = tuple(row for rows in GROUPS.values() for row in rows)
