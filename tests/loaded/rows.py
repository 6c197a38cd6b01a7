"""All rows of docs/loading.md, group by group. A new group is a module with a `ROWS`, and a line here."""

from __future__ import annotations

from tests.loaded import modular, quantized
from tests.loaded.row import Row

GROUPS: dict[str, tuple[Row, ...]] = {
    "Weights, as they came": quantized.ROWS,
    "Modular pipelines": modular.ROWS,
}
ROWS = tuple(row for rows in GROUPS.values() for row in rows)
