"""Models cut into shards over two real processes (gloo): caches act, members decide alike, undo is bit-exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 500  # members that wait for each other for ever end here


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1", "2"])
def test_a_cache_acts_on_shards(kind: str, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.loaded.fsdp_worker", str(rank), "2", str(tmp_path / "store"), kind],
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
    members = [json.loads(text.splitlines()[-1]) for text in printed]
    for member in members:
        assert member["parts"] < 0.6 * member["whole"], "each holds a part"
        assert member["plain"] and member["undone"]
        assert member["schedule"], "bit by bit the picture that the whole model makes under this cache"
        assert member["together"]["schedule"] == member["alone"]["schedule"] == "CC.C.."
    first, second = members
    assert first["together"] == second["together"], "who computes, gathers the layers of all"
    assert all("." in strip for strip in first["together"].values())
