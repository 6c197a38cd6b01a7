"""Rows: modular pipelines."""

from __future__ import annotations

from typing import Any

from tests.loaded.row import Row, Says
from tests.modular import pipelines

NO_NEGATIVE = Says("takes no negative prompt")


def _run(name: str) -> Any:
    return lambda pipe, **overrides: pipelines.run(pipe, name)


ROWS = (
    Row("`ModularPipeline`, FLUX.1", lambda: pipelines.build("flux"), {"guidance": NO_NEGATIVE}, "flux", _run("flux")),
    Row("`ModularPipeline` with a guider, Wan", lambda: pipelines.build("wan"), {}, "wan", _run("wan")),
)
