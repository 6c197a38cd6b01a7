"""What is known of the denoiser call after this one: whether its blocks will run at all.

Weights are fetched for a call ahead only where that call is known to be computed: no cache is on, or its schedule
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.run import Call

LAST = None  # there is no call after this one


def call_after(call: Call) -> tuple[int, str, str] | None:
    """(step, component, branch) of the next call of this loop as the step before ran, or LAST."""
    run, step = call.run, call.step
    this: list[tuple[str, str]] = []
    before: list[tuple[str, str]] = []
    for past in reversed(run.calls):
        if past.loop != call.loop or past.step < step - 1:
            break
        (this if past.step == step else before).append((past.component, past.branch))
    this.reverse()
    before.reverse()
    if len(before) > len(this):
        return (step, *before[len(this)])
    if run.total is not None and step + 1 >= run.total:
        return LAST
    return (step + 1, *this[0])


def will_compute(call: Call, listeners: Sequence[Any]) -> bool:
    """Is the next call sure to run its blocks, as far as the levers that listen to this denoiser say?"""
    after = call_after(call)
    if after is LAST:
        return False
    for listener in listeners:
        reuses = getattr(listener, "reuses", None)
        if reuses is not None and reuses(call.run, *after) is not False:
            return False
    return True
