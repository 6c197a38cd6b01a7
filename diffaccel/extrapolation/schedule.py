"""Static schedules: which steps are computed is known before the loop. No tensor is looked at.

Every function returns one flag per step, True = computed; step 0 always is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ..core.options import GOT, confirm, is_whole, plain, short, whole
from ..errors import InvalidOptionError

Mask = tuple[bool, ...]


# ---- what users write ----------------------------------------------------------------------------------------------


def parse_schedule(value: str | Sequence[int] | Sequence[bool], total: int) -> Mask:
    """A mask from "1011…", from flags, or from the list of computed steps.

    Whole numbers that repeat, or booleans, are flags; distinct whole numbers are step indices (negative ones count
    from the end).
    """
    if isinstance(value, str):
        text = value.replace(" ", "").replace("_", "")
        if not text or set(text) - {"0", "1"}:
            raise InvalidOptionError(f"a schedule string holds only 0 and 1, one per step, got {short(value)}")
        return check_mask([c == "1" for c in text], total)
    values = _listed(value)
    if _are_flags(values):
        return check_mask([bool(v) for v in values], total)
    return mask_of_steps(values, total)


def _listed(value: Any) -> list[int]:
    """The entries of a list of steps, or of flags."""
    values: list[int] = plain(list(value)) if isinstance(value, Sequence) else plain(value)
    steps = isinstance(values, list) and (all(map(is_whole, values)) or all(isinstance(v, bool) for v in values))
    if not steps or not values:
        raise InvalidOptionError(
            f"a schedule is a string of 0 and 1, or a list of flags or of steps, got {short(value)}"
        )
    return values


def _are_flags(values: Sequence[int]) -> bool:
    return all(isinstance(v, bool) for v in values) or (len(set(values)) < len(values) and set(values) <= {0, 1})


def check_form(value: str | Sequence[int]) -> None:
    """Refuse, before any loop is known, what no loop could take: other signs, or a first step that is reused."""
    if isinstance(value, str):
        parse_schedule(value, len(value.replace(" ", "").replace("_", "")))
        return
    steps = _listed(value)
    if _are_flags(steps):
        parse_schedule(steps, len(steps))
        return
    for before, after in pairwise(steps):
        if before == after:
            raise InvalidOptionError(f"the schedule names a step twice: {before}")
        if (before < 0, before) > (after < 0, after):  # from the first step on, then those that count from the end
            raise InvalidOptionError(
                f"the steps of a schedule must rise, and {after} comes after {before} (flags: a string such as '1011')"
            )
    if min(steps) >= 0:  # negative ones count from an end that is not known yet
        mask_of_steps(steps, max(steps) + 1)


def mask_of_steps(steps: Sequence[int], total: int) -> Mask:
    """The mask whose computed steps are listed."""
    places = [s + total if s < 0 else s for s in steps]
    wrong = [s for s, place in zip(steps, places, strict=True) if not 0 <= place < total]
    if wrong:
        raise InvalidOptionError(f"the schedule names step {wrong[0]}, and the loop has steps 0 to {total - 1}")
    if len(set(places)) < len(places):
        raise InvalidOptionError(f"the schedule names a step twice: {short(list(steps))}")
    return check_mask([t in places for t in range(total)], total)


def check_mask(mask: Sequence[bool], total: int) -> Mask:
    """The mask itself, if it has one flag per step and computes the first one."""
    if len(mask) != total:
        raise InvalidOptionError(f"the schedule has {len(mask)} entries, and the loop has {total} steps")
    if not mask[0]:
        raise InvalidOptionError("the schedule reuses step 0, where nothing is stored yet: begin it with 1")
    return tuple(bool(flag) for flag in mask)


def computed_steps(mask: Sequence[bool]) -> list[int]:
    """Indices of the computed steps."""
    return [t for t, flag in enumerate(mask) if flag]


# ---- published schedules -------------------------------------------------------------------------------------------


def _steps(total: int, computed: Callable[[int], bool]) -> Mask:
    confirm("steps", total, whole(1), GOT)
    return tuple(t == 0 or computed(t) for t in range(total))


def _check_interval(interval: int) -> None:
    confirm("interval", interval, whole(1), GOT)


def uniform(steps: int, interval: int, first: int = 0) -> Mask:
    """Every `interval`-th step from `first` on, and all before. Source: DeepCache (arXiv 2312.00858), uniform 1:N."""
    _check_interval(interval)
    return _steps(steps, lambda t: t < first or (t - first) % interval == 0)


def fora(steps: int, interval: int) -> Mask:
    """Every `interval`-th step and the last one. Source: FORA (arXiv 2407.01425), static caching."""
    _check_interval(interval)
    return _steps(steps, lambda t: t % interval == 0 or t == steps - 1)


def taylorseer(steps: int, interval: int, first: int = 3) -> Mask:
    """The first `first` steps, then every `interval`-th counted from the last of them.

    Source: TaylorSeer (arXiv 2503.06923), its FLUX script (`first_enhance`); no rule for the last step.
    """
    confirm("first_enhance", first, whole(0), GOT)
    _check_interval(interval)
    return _steps(steps, lambda t: t < first or (t - max(first, 1) + 1) % interval == 0)


def diffusers_taylorseer(steps: int, interval: int = 5, before: int = 3, after: int | None = None) -> Mask:
    """All below `before`, then every `interval`-th counted from before + 1, and all from `after` on.

    Source: diffusers 0.42.1, TaylorSeerCacheConfig (cache_interval, disable_cache_before_step, ..._after_step).
    """
    _check_interval(interval)
    late = steps if after is None else after
    return _steps(steps, lambda t: t < before or t >= late or (t - before - 1) % interval == 0)


def pyramid(timesteps: Sequence[float], interval: int, low: float, high: float) -> Mask:
    """Computed where the timestep is not strictly between `low` and `high`, else every `interval`-th step.

    Source: PAB (arXiv 2408.12588), broadcast ranges (diffusers: 2 for spatial attention within 100 and 800).
    """
    _check_interval(interval)
    return _steps(len(timesteps), lambda t: not low < timesteps[t] < high or t % interval == 0)


def delta_dit(steps: int, interval: int, switch: int) -> list[str]:
    """Per step "full", or the block range whose difference is reused: "rear" before step `switch`, "front" after.

    Source: Delta-DiT (arXiv 2406.01125): early steps draw outlines, which front blocks make; late ones draw detail.
    """
    mask = uniform(steps, interval)
    return ["full" if computed else "rear" if t < switch else "front" for t, computed in enumerate(mask)]
