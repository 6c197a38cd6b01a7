"""First-block caching through the real hooks, against golden values computed from the published formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel.caching.guards import Guards
from tests.caching.scripted import Driven, drive

ALL = json.loads((Path(__file__).parent.parent / "data" / "cache_golden.json").read_text())["cases"]
CASES = {name: ALL[name] for name in ["dbcache_W4_R0.12", "fbcache_thr0.08", "fbcache_threshold0_is_noop"]}


def run(case: dict[str, Any], threshold: float) -> Driven:
    x, front, middle = (torch.tensor(case["inputs"][k], dtype=torch.float64) for k in ("x", "F_res", "M_res"))
    guards = Guards(min_steps=0, last_steps=0, warmup_steps=case["params"].get("warmup", 0))
    return drive(x, front, middle, threshold, guards)


@pytest.mark.parametrize("name", sorted(CASES))
def test_golden(name: str) -> None:
    case = CASES[name]
    hits, gates, y, _ = run(case, case["params"]["threshold"])
    assert hits == case["expected"]["hit"]
    for got, want in zip(gates, case["expected"]["rel_l1"], strict=True):
        assert (got is None) == (want is None) and (want is None or got == pytest.approx(want, abs=1e-6))
    assert torch.allclose(y, torch.tensor(case["expected"]["y"], dtype=torch.float64), atol=1e-6, rtol=0)


def test_another_threshold_gives_another_pattern() -> None:
    """Negative control."""
    case = CASES["fbcache_thr0.08"]
    assert run(case, 0.12).hits != case["expected"]["hit"]
