"""Members of a process group decide alike, through the engine: two processes, joined by gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffaccel.caching.gates.base import ProbeGate
from diffaccel.caching.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300  # a hang ends here; two processes need some ten seconds of CPU


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes printed."""
    store = tmp_path_factory.mktemp("group") / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.caching.distributed_worker", str(rank), "2", str(store)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]


GATES = ("adacache", "adaptive", "dicache", "easycache", "first_block", "seacache", "teacache")


@pytest.mark.parametrize("gate", GATES)
def test_two_members_decide_alike(members: list[dict[str, Any]], gate: str) -> None:
    first, second = members
    assert first["alone"][gate] != second["alone"][gate], "the members must straddle the threshold"
    assert first["together"][gate] == second["together"][gate]
    assert gate == "adaptive" or first["gates"][gate] == second["gates"][gate], "both compared one number"
    hits = first["together"][gate]
    assert True in hits and False in hits[1:-1]


def test_the_larger_distance_rules(members: list[dict[str, Any]]) -> None:
    """By hand: below 10 % of growth since the last computed step, for the member that grew more."""
    marks = {
        key: "".join(".C"[not hit] for hit in member[place]["first_block"])
        for key, member, place in (
            ("first", members[0], "alone"),
            ("second", members[1], "alone"),
            ("both", members[0], "together"),
        )
    }
    assert marks == {"first": "CC..CC..CC", "second": "C..C..C..C", "both": "CC.C.C..CC"}


def test_a_solver_meets_the_same_levels(members: list[dict[str, Any]]) -> None:
    """Where one model's shards are gathered, all members must call it equally often."""
    first, second = (member["levels"] for member in members)
    assert first["alone"] != second["alone"], "the negative control"
    assert first["together"] == second["together"]
    assert len(set(first["together"])) >= max(len(set(row["alone"])) for row in (first, second))


def test_the_group_reaches_the_engine() -> None:
    group = object()
    cache = METHODS["custom"](gate=ProbeGate(0.1), process_group=group)  # type: ignore[call-arg]
    assert cache.recipe(None).process_group is group  # type: ignore[arg-type]
