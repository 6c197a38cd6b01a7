"""docs/coverage.md is what its generator writes today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tests import tiny

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("make_coverage", DOCS / "make_coverage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    made = generator().page()
    assert made == (DOCS / "coverage.md").read_text(), "run python docs/make_coverage.py"


def test_contexts_are_seen() -> None:
    """SD3 opens none, FLUX and Wan do."""
    found = {name: generator().gives_context(tiny.build(name)) for name in ("flux", "wan", "sd3")}
    assert found == {"flux": True, "wan": True, "sd3": False}
