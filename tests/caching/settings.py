"""Every step cache at a setting that acts on the tiny pipelines, at its neutral setting, and how to put it on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from diffaccel import accelerate
from tests import tiny
from tests.invariants.levers import THRESHOLD

NO_GUARDS = {"cache_min_steps": 0, "cache_last_steps": 0}

# Of six steps some are computed and some reused; thresholds are in BUDGET, as they go with a family's numbers.
ACTING: dict[str, dict[str, Any]] = {
    "adacache": {"cache": "adacache"},
    "adaptive": {"cache": "adaptive", "cache_tolerance": 1.0},
    "dbcache": {"cache": "dbcache", "cache_front_blocks": 1, "cache_back_blocks": 1, "cache_warmup_steps": 0},
    "delta_dit": {"cache": "delta_dit", "cache_interval": 2},
    "dicache": {"cache": "dicache", "cache_start": 0.0},
    "easycache": {"cache": "easycache", "cache_warmup_steps": 0},
    "first_block": {"cache": "first_block"},
    "first_block order 1": {"cache": "first_block", "cache_order": 1},
    "interval": {"cache": "interval", "cache_interval": 2},
    "magcache": {"cache": "magcache", "cache_ratios": [1.0] + [0.9] * 5, "cache_retention": 0.1},
    "schedule": {"cache": "schedule", "cache_steps": [0, 1, 3]},
    "seacache": {"cache": "seacache"},
    "taylorseer lite": {"cache": "taylorseer", "cache_interval": 2, "cache_first_enhance": 2},
    "taylorseer modules": {
        "cache": "taylorseer",
        "cache_interval": 2,
        "cache_first_enhance": 2,
        "cache_use_lite_mode": False,
    },
    "teacache": {"cache": "teacache", "cache_coefficients": (1.0, 0.0)},
}
METHODS = tuple(ACTING)
BUDGET: dict[str, dict[str, float]] = {
    "dbcache": THRESHOLD,
    "dicache": {"flux": 0.12, "wan": 0.15, "sd3": 0.12},
    "easycache": {"flux": 0.2, "wan": 0.3, "sd3": 0.2},
    "first_block": THRESHOLD,
    "first_block order 1": THRESHOLD,
    "magcache": {"flux": 0.15, "wan": 0.15, "sd3": 0.15},
    "seacache": {"flux": 0.5, "wan": 1.0, "sd3": 0.8},
    "teacache": {"flux": 0.15, "wan": 1.0, "sd3": 0.15},
}
NEUTRAL: dict[str, dict[str, Any]] = {
    "adaptive": {"cache_tolerance": 0.0},
    "delta_dit": {"cache_interval": 1},
    "interval": {"cache_interval": 1},
    "schedule": {"cache_steps": [0, 1, 2, 3, 4, 5]},
    "taylorseer lite": {"cache_interval": 1},
    "taylorseer modules": {"cache_interval": 1},
} | {name: {"cache_threshold": 0.0} for name in BUDGET}
FORECASTS = ("first_block order 1", "taylorseer lite", "taylorseer modules")


def options(family: str, method: str, **changes: Any) -> dict[str, Any]:
    """Overrides that switch a method on with no guard in the way."""
    kin = "wan" if family.startswith("wan") else family.split("_")[0]
    budget = {"cache_threshold": BUDGET[method][kin]} if method in BUDGET else {}
    return ACTING[method] | budget | NO_GUARDS | changes


def neutral(family: str, method: str) -> dict[str, Any]:
    """Overrides at which the method computes everything."""
    return options(family, method, **NEUTRAL[method])


def cached(family: str, method: str, **changes: Any) -> Any:
    """A fresh pipeline with the method on."""
    return accelerate(tiny.build(family), preset=None, **options(family, method, **changes))


def latents(pipe: Any, family: str, **call: Any) -> torch.Tensor:
    """One deterministic call that is not decoded."""
    return tiny.run(pipe, family, output_type="latent", **call)


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors that a `caching.policy.Memory`, or a part of one, refers to."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from tensors_in(part)
    else:
        for name in getattr(type(thing), "__slots__", ()):
            yield from tensors_in(getattr(thing, name))


def strip(pipe: Any) -> dict[str, str]:
    """`C` computed, `.` reused, per branch of the last run."""
    found: dict[str, str] = pipe.acceleration.report.strip()
    return found


_memo: dict[tuple[Any, ...], Any] = {}


def plain_latents(family: str, **call: Any) -> torch.Tensor:
    """What a pipeline never touched gives."""
    key = (family, str(sorted(call.items())))
    if key not in _memo:
        _memo[key] = latents(tiny.build(family), family, **call)
    result: torch.Tensor = _memo[key]
    return result.clone()


def first_latents(family: str, method: str, **call: Any) -> tuple[torch.Tensor, dict[str, str]]:
    """Latents and strips of the first run of a fresh pipeline with the method on."""
    key = (family, method, str(sorted(call.items())))
    if key not in _memo:
        pipe = cached(family, method)
        _memo[key] = latents(pipe, family, **call), strip(pipe)
    result, found = _memo[key]
    return result.clone(), dict(found)


def assert_fresh(pipe: Any, family: str, method: str, **call: Any) -> None:
    """The next run gives the latents and the hits of a fresh pipeline with the method on."""
    result = latents(pipe, family, **call)
    reference, found = first_latents(family, method, **call)
    assert strip(pipe) == found, f"{method} on {family} {call}"
    assert torch.equal(result, reference), f"{method} on {family} {call}: differs from a fresh pipeline"
