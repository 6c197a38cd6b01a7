"""What each level of the dial means for step caches. These numbers stand here and nowhere else."""

from __future__ import annotations

from ..core.place import BALANCED

# Level -> parameters of the adaptive cache. What a level computes and keeps on the testbeds is in docs/caching.md.
ADAPTIVE: dict[str, dict[str, float]] = {
    "careful": {"tolerance": 0.002},
    "balanced": {"tolerance": 0.006},
    "fast": {"tolerance": 0.02},
}
TOLERANCE = ADAPTIVE[BALANCED]["tolerance"]  # of an adaptive cache that is told neither a level nor a tolerance
