"""What the ledger expects of the adaptive cache is what was counted on the testbeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffaccel.caching.dial import ADAPTIVE
from diffaccel.ledger.exchange.adaptive import AT_28, GUIDED, TOLERANCES, at_28, expected

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROWS = json.loads((RESULTS / "adaptive_steps.json").read_text())["rows"]
SWEEP = json.loads((RESULTS / "adaptive_quality.json").read_text())["rows"]


def test_the_levels_are_the_dials() -> None:
    assert tuple(level["tolerance"] for level in ADAPTIVE.values()) == TOLERANCES
    counted = {kind: tuple(ROWS[f"{kind}/28/{level}"]["computed"] for level in ADAPTIVE) for kind in AT_28}
    assert counted == AT_28


@pytest.mark.parametrize("key", sorted(ROWS))
def test_other_numbers_of_steps_are_within_a_fifth(key: str) -> None:
    world, steps, level = key.split("/")
    from diffaccel.ledger.exchange import adaptive

    at = at_28(AT_28[world], ADAPTIVE[level]["tolerance"])
    found = min(int(steps), max(adaptive.LEAST, at * (int(steps) / 28) ** adaptive.GROWTH))
    assert found == pytest.approx(ROWS[key]["computed"], rel=0.2)


@pytest.mark.parametrize("tolerance", [0.001, 0.004, 0.008, 0.016, 0.032])
def test_other_tolerances_are_within_a_fifth(tolerance: float) -> None:
    """Of a sweep with other prompts and seeds."""
    for world, counts in AT_28.items():
        counted = SWEEP[f"{world}/3.0/float32/adaptive-{tolerance:g}"]["computed"]
        assert min(28, at_28(counts, tolerance)) == pytest.approx(counted, rel=0.2), world


def test_a_mean_and_its_range() -> None:
    mean, low, high = expected(28, 0.006, guided=False)
    assert (low, high) == (AT_28["image"][1], AT_28["scenes"][1]) and low < mean < high
    assert expected(28, 0.006, guided=True)[0] == pytest.approx(sum(AT_28[w][1] for w in GUIDED) / 2)
    assert expected(28, None, True) == expected(28, 0.006, True)
    assert expected(4, 0.006, True) == (4, 4, 4) and expected(10**4, 0.02, False)[2] < 100
