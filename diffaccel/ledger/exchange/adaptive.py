"""Expected computed steps of the adaptive cache, by tolerance and by the steps of the loop; from the trained testbeds.

The cache chooses its steps by the picture, so that this is an expectation, with the range over the worlds. Nobody
counted it on published weights. Means over prompts at 28 steps, shift 3: benchmarks/results/adaptive_steps.json, which
tests/ledger/test_adaptive_steps.py holds these numbers to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TOLERANCES = (0.002, 0.006, 0.02)
AT_28 = {"image": (11.5, 8.75, 7.25), "video": (26.0, 15.0, 11.75), "scenes": (27.25, 20.25, 16.0)}
GUIDED = ("scenes", "video")  # two branches, guidance 7 and 4; the world "image" has none
# Computed steps grow with the steps of the loop as their power of so much: the path is the same, its grid is finer.
GROWTH = 0.2
LEAST = 5  # of a loop: the first three and the last one, and one between


def at_28(counts: Sequence[float], tolerance: float) -> float:
    """Linear in the logarithm of the tolerance; beyond the ends by the nearest slope."""
    places = [math.log(value) for value in TOLERANCES]
    here = math.log(tolerance)
    left = 0 if here < places[1] else 1
    slope = (counts[left + 1] - counts[left]) / (places[left + 1] - places[left])
    return counts[left] + slope * (here - places[left])


def expected(steps: int, tolerance: float | None, guided: bool) -> tuple[float, float, float]:
    """(mean, lowest, highest) computed steps over the worlds; with one branch over all of them.

    Models with one branch are not the unguided world alone: most have guidance as an input, and their paths bend as
    guided ones do.
    """
    worlds = [counts for name, counts in AT_28.items() if not guided or name in GUIDED]
    finer = (steps / 28) ** GROWTH
    found = [min(steps, max(LEAST, at_28(counts, tolerance or TOLERANCES[1]) * finer)) for counts in worlds]
    return sum(found) / len(found), min(found), max(found)
