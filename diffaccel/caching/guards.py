"""Guards: where a step is computed, or reused, whatever the gate would say. Plain data, checked in one fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.options import GOT, LIMIT, NUMBER, plain, take, whole
from ..errors import InvalidOptionError, unknown
from ..extrapolation.schedule import check_form, parse_schedule
from .step import Ruling, Step

POLICIES = ("dynamic", "static")


@dataclass(frozen=True, slots=True)
class ReuseCounts:
    """What one branch has done so far in this loop."""

    consecutive: int = 0  # reused steps just before this one
    reused: int = 0  # reused steps in all
    error: float = 0.0  # sum of all numbers that the gate compared, of hits and misses


@dataclass(frozen=True)
class Guards:
    """Checked in this order (that of cache-dit's DBCache): warm-up, last steps, window, mask, caps, accumulated error.

    Attributes:
        min_steps: loops with fewer steps are computed in full (few-step models have no redundancy to use).
        warmup_steps: the first so many steps are computed; of them only every `warmup_interval`-th, from 0.
        last_steps: the last so many steps are computed.
        max_consecutive: at most so many reused steps in a row; None: no limit.
        max_total: at most so many reused steps in the loop.
        max_accumulated: once the compared numbers add up to this, everything is computed; never reset in a loop.
        mask: which steps are computed: flags, a string, a list of steps, or a published mask's name (see `fit`).
        policy: what False in the mask means: "static" reuses without a test, "dynamic" asks the gate.
        start, end: shares of the loop between which a reuse is allowed.
        sigma_high, sigma_low: noise levels between which a reuse is allowed.
        max_bytes: what one branch may hold; older steps are dropped first, which lowers a forecast's order, and with
            none left every step is computed.
        warmup_interval: see warmup_steps.
    """

    min_steps: int = 0
    warmup_steps: int = 0
    last_steps: int = 0
    max_consecutive: int | None = None
    max_total: int | None = None
    max_accumulated: float | None = None
    mask: str | Sequence[int] | None = None
    policy: str = "dynamic"
    start: float = 0.0
    end: float = 1.0
    sigma_high: float | None = None
    sigma_low: float | None = None
    max_bytes: int | None = None
    warmup_interval: int = 1

    def __post_init__(self) -> None:
        take(self, whole(0), "min_steps", "warmup_steps", "last_steps", form=GOT)
        take(self, whole(0).or_none(), "max_consecutive", "max_total", "max_bytes", form=GOT)
        take(self, whole(1), "warmup_interval", form=GOT)
        take(self, NUMBER, "start", "end", form=GOT)
        take(self, LIMIT.or_none(), "max_accumulated", "sigma_high", "sigma_low", form=GOT)
        object.__setattr__(self, "mask", plain(self.mask))  # the one way to set a field of a frozen dataclass
        flags = isinstance(self.mask, (list, tuple)) and self.mask and all(isinstance(f, bool) for f in self.mask)
        if self.mask is not None and not flags and not _is_published(self.mask):
            check_form(self.mask)
        if self.policy not in POLICIES:
            raise unknown("policy", str(self.policy), POLICIES)
        if not 0 <= self.start <= self.end <= 1:
            raise InvalidOptionError(f"0 <= start <= end <= 1 is needed, got start={self.start}, end={self.end}")

    def in_window(self, step: Step) -> bool:
        """Does the step lie between `start` and `end`, and between the noise levels?"""
        if step.total is not None and not self.start <= step.index / step.total < self.end:
            return False
        return (self.sigma_high is None and self.sigma_low is None) or not _outside(self, step.sigma)

    def stands_down(self, total: int | None) -> str | None:
        """Why a cache must sit out a whole loop of `total` steps (None: unknown), or None."""
        if total is None:
            needed = self.min_steps or self.last_steps or self.end < 1
            return (
                "the number of steps is unknown, so min_steps, last_steps and end cannot be kept" if needed else None
            )
        if total < self.min_steps:
            return f"the run has {total} steps, fewer than min_steps={self.min_steps}"
        return None

    def fit(self, total: int | None) -> Guards:
        """The guards for a loop of `total` steps, with the mask as flags; refuses a loop that they do not fit."""
        if total is None and (self.last_steps or self.end < 1):
            raise InvalidOptionError("last_steps and end need the number of steps, and this loop does not say it")
        if self.mask is None:
            return self
        if total is None:
            raise InvalidOptionError("a steps mask needs the number of steps, and this loop does not say it")
        return replace(self, mask=_flags(self.mask, total))


def _is_published(mask: object) -> bool:
    from .tables import load_table

    return isinstance(mask, str) and mask in load_table("steps_masks")["masks"]["28"]


def _flags(mask: str | Sequence[int], total: int) -> tuple[bool, ...]:
    from .tables import steps_mask

    if isinstance(mask, str) and _is_published(mask):
        return steps_mask(mask, total)
    if isinstance(mask, tuple) and all(isinstance(flag, bool) for flag in mask):
        if len(mask) != total:
            raise InvalidOptionError(f"the steps mask has {len(mask)} entries, and the loop has {total} steps")
        return mask
    return parse_schedule(mask, total)


def rule(guards: Guards, counts: ReuseCounts, step: Step) -> Ruling:
    """What the guards say about this step. Reads host data only."""
    index, total = step.index, step.total
    if index < guards.warmup_steps and index % guards.warmup_interval == 0:
        return Ruling.COMPUTE
    if (total is not None and index >= total - guards.last_steps) or not guards.in_window(step):
        return Ruling.COMPUTE
    if guards.mask is not None:
        if guards.mask[index]:
            return Ruling.COMPUTE
        if guards.policy == "static":
            return Ruling.REUSE
    if guards.max_total is not None and counts.reused >= guards.max_total:
        return Ruling.COMPUTE
    if guards.max_consecutive is not None and counts.consecutive >= guards.max_consecutive:
        return Ruling.COMPUTE
    if guards.max_accumulated is not None and counts.error >= guards.max_accumulated:
        return Ruling.COMPUTE
    return Ruling.FREE


def _outside(guards: Guards, sigma: float | None) -> bool:
    if sigma is None:
        raise InvalidOptionError("sigma_high and sigma_low need noise levels, and this scheduler gives none")
    too_high = guards.sigma_high is not None and sigma > guards.sigma_high
    return too_high or (guards.sigma_low is not None and sigma < guards.sigma_low)
