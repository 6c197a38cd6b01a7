"""All golden masks through the tool's own function, and proof that the tool can fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import golden
from tests.attention import golden_masks

DATA = json.loads((Path(__file__).parent.parent / "data" / "sparse_golden.json").read_text())
CASES: dict[str, Any] = {case["name"]: case for case in DATA["cases"]}


def why(case: Any) -> str | None:
    return dict(golden.run("masks", {"cases": [case]}))[case["name"]]


def changed(name: str, edit: Callable[[Any], object]) -> str | None:
    case = copy.deepcopy(CASES[name])
    edit(case)
    return why(case)


@pytest.mark.parametrize("name", sorted(CASES))
def test_holds(name: str) -> None:
    assert why(CASES[name]) is None


def test_widths_hold() -> None:
    results = golden.run("masks", {"cases": [], "svg_width_frames": DATA["svg_width_frames"]})
    assert len(results) == len(DATA["svg_width_frames"]) and all(reason is None for _, reason in results)
    other = [{**case, "width": case["width"] + 1e-4} for case in DATA["svg_width_frames"]]
    assert all(reason for _, reason in golden.run("masks", {"svg_width_frames": other}))


def test_every_kind_has_a_case() -> None:
    assert {case["kind"] for case in CASES.values()} == set(golden_masks.KINDS)


@pytest.mark.parametrize("name", sorted(name for name, case in CASES.items() if case["n_q_blocks"] < 100))
def test_every_claim_is_compared(name: str) -> None:
    """Negative control: each stated value, changed alone, fails the case."""
    for key, value in CASES[name].items():
        if key in ("name", "kind", "params") or key.endswith("note"):
            continue
        other = copy.deepcopy(value)
        if key == "rows":
            other[-1] = other[-1][:-1] + str(1 - int(other[-1][-1]))
        elif isinstance(other, list):
            other[-1] = [1 + x for x in other[-1]] if isinstance(other[-1], list) else other[-1] + 1
        else:
            other = other + 1 if isinstance(other, int) else other + 1e-3
        reason = changed(name, lambda case, key=key, other=other: case.update({key: other}))
        assert reason is not None and key in reason


def test_what_is_unknown_fails() -> None:
    name = next(iter(CASES))
    assert "unknown key 'extra'" in str(changed(name, lambda case: case.update(extra=1)))
    assert "unknown key 'extra'" in str(changed(name, lambda case: case["params"].update(extra=1)))
    assert "unknown kind 'spiral'" in str(changed(name, lambda case: case.update(kind="spiral")))
    assert golden.run("masks", {"cases": [], "more": 1})[-1][1] == "unknown key 'more' in the file"
    assert changed(name, lambda case: case.update(rows=None, kept=None)) is None  # null is not compared
