"""Every searched schedule that the benchmarks use is in a committed result, with its arguments and its seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # the scripts import one another by their bare names
    import cache_settings

    yield cache_settings
    for name in ("cache_settings", "cache_calibrate", "cache_runs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_search_result_says_how_it_was_made(kind: str) -> None:
    document = json.loads((RESULTS / f"search_schedule_{kind}.json").read_text())
    arguments = document["arguments"]
    assert arguments["kind"] == kind and isinstance(arguments["seed"], int)
    assert {"prompts", "computed", "steps"} <= set(arguments)
    for row in document["schedules"]:
        assert len(row["mask"]) == document["steps"] == 28 and row["mask"].count("1") == row["computed"]
        assert {"train_psnr_db", "held_out_psnr_db", "held_out_lowest_db", "refined"} <= set(row)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_the_benchmarks_use_what_was_searched_and_nothing_else(settings, kind: str) -> None:
    masks = {row["mask"] for row in json.loads((RESULTS / f"search_schedule_{kind}.json").read_text())["schedules"]}
    even = {"".join(map(str, settings.even_steps(28, computed))) for computed in (14, 9)}
    used = {
        s.options["cache_steps"] for s in settings.settings() if s.method.startswith("schedule") and kind in s.kinds
    }
    assert used - even == masks - even
    for computed in (14, 9):
        assert settings.searched_mask(kind, computed) in masks
    with pytest.raises(LookupError, match="no schedule was searched for 3 steps"):
        settings.searched_mask(kind, 3)


def test_results_name_the_origin_of_every_mask() -> None:
    """Rows of earlier runs whose search was not kept are marked, so that nobody takes them for reproducible."""
    for name in ("cache_quality", "cache_quality_video"):
        for run in json.loads((RESULTS / f"{name}.json").read_text())["runs"]:
            for row in run["settings"]:
                if "searched" in row["name"] or row.get("our_schedule"):
                    assert row["origin"], row["name"]
