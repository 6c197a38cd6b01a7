"""Limits: where a step is computed, or reused, whatever the gate would say. Plain data, checked in one fixed order."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidOptionError, unknown
from .step import Ruling, Step

POLICIES = ("dynamic", "static")


@dataclass(frozen=True, slots=True)
class Tally:
    """What one branch has done so far in this loop."""

    consecutive: int = 0  # reused steps just before this one
    reused: int = 0  # reused steps in all
    error: float = 0.0  # sum of all numbers that the gate compared, of hits and misses


@dataclass(frozen=True)
class Limits:
    """Checked in this order (that of cache-dit's DBCache): warm-up, last steps, window, mask, caps, accumulated error.

    Attributes:
        warmup_steps: the first so many steps are computed; of them only every `warmup_interval`-th, from 0.
        last_steps: the last so many steps are computed.
        max_consecutive: at most so many reused steps in a row; None: no limit.
        max_total: at most so many reused steps in the loop.
        max_accumulated: once the compared numbers add up to this, everything is computed; never reset in a loop.
        mask: one flag per step, True = compute.
        policy: what False in the mask means: "static" reuses without a test, "dynamic" asks the gate.
        start, end: shares of the loop between which a reuse is allowed.
        sigma_high, sigma_low: noise levels between which a reuse is allowed.
        max_bytes: what one branch may hold; older steps are dropped first, which lowers a forecast's order, and with
            none left every step is computed.
        warmup_interval: see warmup_steps.
    """

    warmup_steps: int = 0
    last_steps: int = 0
    max_consecutive: int | None = None
    max_total: int | None = None
    max_accumulated: float | None = None
    mask: tuple[bool, ...] | None = None
    policy: str = "dynamic"
    start: float = 0.0
    end: float = 1.0
    sigma_high: float | None = None
    sigma_low: float | None = None
    max_bytes: int | None = None
    warmup_interval: int = 1

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "last_steps", "max_consecutive", "max_total", "max_bytes", "warmup_interval"):
            value, least = getattr(self, name), 1 if name == "warmup_interval" else 0
            if value is None and name.startswith("max_"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidOptionError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.policy not in POLICIES:
            raise unknown("policy", str(self.policy), POLICIES)
        if not 0 <= self.start <= self.end <= 1:
            raise InvalidOptionError(f"0 <= start <= end <= 1 is needed, got start={self.start}, end={self.end}")

    def check(self, total: int | None) -> None:
        """Refuse a loop that these limits do not fit."""
        if self.mask is not None and total is not None and len(self.mask) != total:
            raise InvalidOptionError(f"the steps mask has {len(self.mask)} entries, and the loop has {total} steps")
        if total is None and (self.last_steps or self.end < 1):
            raise InvalidOptionError("last_steps and end need the number of steps, and this loop does not say it")


def rule(limits: Limits, tally: Tally, step: Step) -> Ruling:
    """What the limits say about this step. Reads host data only."""
    index, total = step.index, step.total
    if index < limits.warmup_steps and index % limits.warmup_interval == 0:
        return Ruling.COMPUTE
    if total is not None and (index >= total - limits.last_steps or not limits.start <= index / total < limits.end):
        return Ruling.COMPUTE
    if (limits.sigma_high is not None or limits.sigma_low is not None) and _outside(limits, step.sigma):
        return Ruling.COMPUTE
    if limits.mask is not None:
        if limits.mask[index]:
            return Ruling.COMPUTE
        if limits.policy == "static":
            return Ruling.REUSE
    if limits.max_total is not None and tally.reused >= limits.max_total:
        return Ruling.COMPUTE
    if limits.max_consecutive is not None and tally.consecutive >= limits.max_consecutive:
        return Ruling.COMPUTE
    if limits.max_accumulated is not None and tally.error >= limits.max_accumulated:
        return Ruling.COMPUTE
    return Ruling.FREE


def _outside(limits: Limits, sigma: float | None) -> bool:
    if sigma is None:
        raise InvalidOptionError("sigma_high and sigma_low need noise levels, and this scheduler gives none")
    too_high = limits.sigma_high is not None and sigma > limits.sigma_high
    return too_high or (limits.sigma_low is not None and sigma < limits.sigma_low)
