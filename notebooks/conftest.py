"""`pytest --nbmake notebooks` runs the notebooks, where the trained weights are there."""

from __future__ import annotations

import pytest

from diffaccel.testbed.bundle import WEIGHTS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the notebooks of this folder, with the reason, where the testbed's weights are missing."""
    if (WEIGHTS / "image" / "model_index.json").exists():
        return
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.skip(reason=f"the testbed's trained weights are missing from {WEIGHTS}"))
