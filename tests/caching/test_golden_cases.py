"""All golden cases of step caches through the tool's own function, and proof that the tool can fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffaccel.caching.engine import Engine
from tests import golden
from tests.caching import golden_cases

DATA = json.loads((Path(__file__).parent.parent / "data" / "cache_golden.json").read_text())
CASES: dict[str, Any] = DATA["cases"]


def why(kind: str, data: Any, name: str) -> str | None:
    """What the tool says about one case: None if it holds."""
    return dict(golden.run(kind, data))[name]


def changed(name: str, edit: Callable[[Any], object]) -> str | None:
    """The same for a case after an edit of it."""
    case = copy.deepcopy(CASES[name])
    edit(case)
    return why("caches", {"cases": {name: case}}, name)


@pytest.mark.parametrize("name", sorted(CASES))
def test_holds(name: str) -> None:
    assert why("caches", {"cases": {name: CASES[name]}}, name) is None


ENGINE = {"dbcache", "dicache", "easycache", "hicache", "magcache", "seacache", "taylorseer", "teacache"}


def test_whatever_has_steps_runs_through_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an engine that never reuses fails exactly the cases in which a step is reused."""
    settle = Engine._settle
    monkeypatch.setattr(Engine, "_settle", lambda self, hit, seen: settle(self, False, seen))
    seen = set()
    for name, case in CASES.items():
        if case["kind"] in ENGINE:
            reuses = isinstance(case["expected"], dict) and True in case["expected"].get("hit", [True])
            assert (why("caches", {"cases": {name: case}}, name) is None) == (not reuses), name
            seen.add(case["kind"])
    assert seen == ENGINE


def test_every_kind_of_the_format_has_a_case() -> None:
    assert {case["kind"] for case in CASES.values()} == set(golden_cases.KINDS)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, part in value.items() if key != "method" for leaf in _leaves(part, (*path, key))]
    if isinstance(value, list):
        return [leaf for i, part in enumerate(value) for leaf in _leaves(part, (*path, i))]
    return [path] if isinstance(value, (bool, int, float)) else []


def _spoil(case: dict[str, Any], path: tuple[Any, ...]) -> None:
    place = case["expected"]
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    place[path[-1]] = (not old) if isinstance(old, bool) else old + (1 if isinstance(old, int) else 1e-5)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_changed_value_fails(name: str) -> None:
    """Negative control: the first and last expected value under every key, off by 1e-5 (or by one, or flipped)."""
    expected = CASES[name]["expected"]
    parts = expected.items() if isinstance(expected, dict) else enumerate(expected)
    for key, part in parts:
        if CASES[name]["kind"] == "schedule":
            part = {"computed": part["computed"]}
        leaves = _leaves(part, (key,))
        for leaf in {leaves[0], leaves[-1]} if leaves else ():
            assert changed(name, lambda case, leaf=leaf: _spoil(case, leaf)) is not None, leaf


@pytest.mark.parametrize("place", ["case", "inputs", "params", "expected"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_an_unknown_key_fails(name: str, place: str) -> None:
    def edit(case: dict[str, Any]) -> None:
        holder = case if place == "case" else case.setdefault(place, {})
        if isinstance(holder, list):  # a schedule: its entries are what is expected
            holder = holder[0]
        holder["surprise"] = 1

    assert "surprise" in (changed(name, edit) or "")


def test_other_failures() -> None:
    name = "fbcache_thr0.08"
    assert "unknown kind 'other'" in (changed(name, lambda case: case.update(kind="other")) or "")
    assert "missing key 'threshold'" in (changed(name, lambda case: case["params"].pop("threshold")) or "")
    assert "nothing is expected" in (changed(name, lambda case: case.update(expected={})) or "")
    assert changed(name, lambda case: case["expected"]["hit"].pop()) is not None
    assert changed("schedules", lambda case: case["expected"][0].update(method="other")) is not None
    assert why("caches", {"cases": {}}, "file") == "no cases"
    assert why("caches", {"cases": {}, "more": 1}, "file") == "unknown key 'more' in the file"
    assert "unknown kind 'quilts'" in (why("quilts", DATA, "file") or "")


def test_null_is_not_compared() -> None:
    assert changed("teacache_identity_thr0.1", lambda case: case["expected"].update(raw=None)) is None


def test_numbers_within_a_millionth() -> None:
    golden.compare(1.0, 1.0 + 9e-7, "x")
    for wrong in (1.0 + 2e-6, float("nan"), None, "1.0"):
        with pytest.raises(golden.Mismatch):
            golden.compare(1.0, wrong, "x")


def test_printed_lines_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = copy.deepcopy(CASES["fbcache_thr0.08"]), copy.deepcopy(CASES["fbcache_thr0.08"])
    bad["expected"]["hit"][3] = True
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": {"good": good, "bad": bad}}))
    assert golden.main(["caches", str(path)]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("ok good", "1 of 2 cases hold")
    assert second == "FAIL bad expected.hit[3]: expected True, got False"
    path.write_text(json.dumps({"cases": {"good": good}}))
    assert golden.main(["caches", str(path)]) == 0
    assert capsys.readouterr().out == "ok good\n1 of 1 cases hold\n"
    assert golden.main(["caches", str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().out.endswith("0 of 1 cases hold\n")
    assert golden.main(["caches"]) == 2
