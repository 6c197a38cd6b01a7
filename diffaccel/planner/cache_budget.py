"""What a budget of computed steps, seconds or decibels asks of the step cache: the adaptive one takes it up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from ..errors import BudgetError
from .options import Budget
from .plan import PlanItem

GOVERNED = "adaptive"  # the cache that a budget steers
ASKED = ("max_steps", "max_seconds", "min_psnr_db")  # of a budget, and parameters of that cache


def govern(
    budget: Budget, wishes: dict[str, object], calibration: Mapping[str, object], strict: bool
) -> tuple[dict[str, object], list[PlanItem]]:
    """(the wishes with what the budget asks of the cache, items for what it cannot take up).

    Where no cache was asked for, the adaptive one comes in; where it was switched off or another one is asked for,
    that stands, and the budget's steps and seconds are listed as skipped (BudgetError if `strict`). A PSNR keeps other
    lossy levers off by itself.
    """
    asked = {name: getattr(budget, name) for name in ASKED if getattr(budget, name) is not None}
    if not asked:
        return wishes, []
    cache = wishes.get("cache", GOVERNED)
    if cache == GOVERNED:
        given = {f"cache_{name}": value for name, value in asked.items()}
        fit = calibrated(calibration) if budget.min_psnr_db is not None else None
        if fit is not None:
            given["cache_calibration"] = fit
        return {**wishes, "cache": GOVERNED, **given}, []
    what = f"cache={cache!r} is asked for" if cache else "the cache is switched off"
    items = []
    for name in ("max_steps", "max_seconds"):
        if name in asked:
            reason = f"{name}={asked[name]:g} is kept by cache='{GOVERNED}', and {what}"
            if strict:
                raise BudgetError(reason)
            items.append(PlanItem(f"budget.{name}", "call", "skipped", reason, "exact"))
    return wishes, items


def calibrated(table: Mapping[str, object]) -> tuple[float, float, float] | None:
    """Level, slope and margin in dB from the [calibration] of a tuned preset; None where there is none.

    The margin is what nine prompts of ten keep, with one more to come; where there are too few for that, the largest.
    """
    names = ("psnr_at_one_db", "psnr_per_decade_db", "lowest_residuals_db")
    if not all(name in table for name in names):
        return None
    level, slope = (float(cast(float, table[name])) for name in names[:2])
    short = sorted(-float(value) for value in cast(Sequence[float], table[names[2]]))
    place = min(len(short), math.ceil(0.9 * (len(short) + 1))) - 1
    return level, abs(slope), max(short[place], 0.0)
