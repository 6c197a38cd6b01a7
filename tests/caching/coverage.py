"""Which step cache acts on which family: the options under which this is asked, and where a method is left out.

Shared by the tests and by `docs/make_coverage.py`.
"""

from __future__ import annotations

from typing import Any

from diffaccel.caching.gates.base import ProbeGate
from diffaccel.caching.scopes.stack import Stack
from tests.models.families.table import FAMILIES

COVERED: dict[str, Any] = {"cache_min_steps": 0, "cache_last_steps": 0}
# Options with which every method reuses some of five steps; numbers that are calibrated per model are made up.
OPTIONS: dict[str, dict[str, Any]] = {
    "adacache": {"cache_codebook": {1e9: 3}},
    "adaptive": {"cache_tolerance": 1e9},
    "custom": {"cache_gate": ProbeGate(1e9, tested=True), "cache_scope": Stack(1), "cache_max_consecutive": 1},
    "dbcache": {"cache_threshold": 1.0, "cache_front_blocks": 1, "cache_warmup_steps": 1},
    "delta_dit": {"cache_interval": 2},
    "dicache": {"cache_threshold": 1e9, "cache_start": 0.0},
    "easycache": {"cache_threshold": 1e9, "cache_warmup_steps": 0},
    "first_block": {"cache_threshold": 1e9},
    "interval": {"cache_interval": 2},
    "magcache": {
        "cache_ratios": [1.0] * 10,
        "cache_threshold": 1.0,
        "cache_max_steps": 3,
        "cache_retention": 0.1,
    },
    "schedule": {"cache_steps": [0, 2]},
    "seacache": {"cache_threshold": 1e9},
    "taylorseer": {"cache_interval": 2, "cache_first_enhance": 1},
    "teacache": {"cache_coefficients": (1.0, 0.0), "cache_threshold": 1e9},
}
_NO_NORM = "does not say how its first block modulates its input"
SKIPPED: dict[str, dict[str, str]] = {
    "teacache": dict.fromkeys(("flux2", "ltx2", "pixart", "qwen", "sana", "z_image"), _NO_NORM),
}
# Where a method is on but steps aside in every run with the pipeline's own scheduler: part of the note that says why.
_OTHER_NOISE = "noise levels of flow matching"
ASIDE: dict[tuple[str, str], str] = {
    ("seacache", "cogvideox"): "gives no noise levels",
    ("seacache", "pixart_alpha"): _OTHER_NOISE,
    ("seacache", "pixart_sigma"): _OTHER_NOISE,
}


# What acts on blocks from outside is not in the way of caches of the whole output.
WHOLE = ("adaptive", "easycache", "schedule", "taylorseer")
# Families whose second call of a loop is told something else than the first (stored keys and values).
SECOND_ANEW = ("flux2_klein_kv",)


def steps_aside(method: str, family: str) -> str | None:
    """Part of the note with which `method` keeps out of every run of a pipeline under test, None where it acts."""
    aside = FAMILIES[family].stands_down if family in FAMILIES and method not in WHOLE else ""
    return ASIDE.get((method, family)) if "controlnet" in aside else aside or ASIDE.get((method, family))


def skipped_because(method: str, family: str) -> str | None:
    """Part of the reason for which `method` is left out of a pipeline under test, None where it acts."""
    if "controlnet" in FAMILIES[family].stands_down and method not in WHOLE:
        return "the controlnet of"
    return SKIPPED.get(method, {}).get(FAMILIES[family].card)
