"""Guards: where a cache must not act, whatever its gate says. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidOptionError


@dataclass(frozen=True)
class Guards:
    """Bounds on a cache.

    Attributes:
        min_steps: runs with fewer steps are computed in full (few-step models have no redundancy to use).
        last_steps: so many steps at the end are always computed.
        warmup_steps: so many steps at the start are always computed (the first one always is).
        max_consecutive: at most so many reused steps in a row; None for no limit.
    """

    min_steps: int = 9
    last_steps: int = 1
    warmup_steps: int = 0
    max_consecutive: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_steps", "last_steps", "warmup_steps", "max_consecutive"):
            value = getattr(self, name)
            if name == "max_consecutive" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidOptionError(f"{name} must be a whole number of at least 0, got {value!r}")


def stands_down(guards: Guards, total: int | None) -> str | None:
    """Why the cache must sit out the whole run, or None. `total` is the run's number of steps if known."""
    if total is None:
        if guards.min_steps or guards.last_steps:
            return "the number of steps is unknown, so min_steps and last_steps cannot be kept"
        return None
    if total < guards.min_steps:
        return f"the run has {total} steps, fewer than min_steps={guards.min_steps}"
    return None


def must_compute(guards: Guards, step: int, total: int | None, consecutive: int) -> bool:
    """Must this step be computed? `consecutive` counts the reused steps just before it."""
    if step < guards.warmup_steps or (total is not None and step >= total - guards.last_steps):
        return True
    return guards.max_consecutive is not None and consecutive >= guards.max_consecutive
