"""docs/loading.md is what its generator writes today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("make_loading", DOCS / "make_loading.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    assert generator().page() == (DOCS / "loading.md").read_text(), "run python docs/make_loading.py"


def test_letters_go_on_after_z() -> None:
    assert [generator()._letter(count) for count in (0, 25, 26, 53)] == ["a", "z", "aa", "bb"]
