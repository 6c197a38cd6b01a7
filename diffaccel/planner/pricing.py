"""A plan with what the ledger computes: each item's gain, the whole, what fits, and what would keep a budget.

Nothing here asks for weights or makes a module: the pipeline's configs are read, and the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import DiffaccelError
from ..ledger.book import Ledger
from ..ledger.exchange.account import Account
from ..ledger.exchange.stack import Row, Stack
from ..ledger.ledger_text import short
from ..ledger.models import Model
from .costs import book_of
from .plan import Plan, PlanItem
from .remedies import remedies

if TYPE_CHECKING:
    from ..core.accelerator import Target

OURS = ("computed for ", "memory, computed: ")  # how notes of the whole begin


def priced(plan: Plan, target: Target, model: Model | None = None, asked: Mapping[str, int] | None = None) -> Plan:
    """The plan with `gain` (and `how`) in each item whose exchange is known, and notes about the whole.

    Args:
        model: what the pipeline is made of, where it came from configs; else the pipeline's own configs are read.
        asked: height, width, frames, steps; the model's usual ones where they are not given.

    A pipeline that the ledger has no closed form for keeps its plan as it is.
    """
    try:
        ledger = book_of(target, model, asked)
    except DiffaccelError:
        return plan
    stack = ledger.apply(plan, target.hardware)
    notes = (*_whole(ledger, stack), *_memory(plan, ledger, stack, target), *_too_slow(plan, ledger, stack, target))
    return replace(with_gains(plan, stack), notes=(*plan.notes, *notes))


def with_gains(plan: Plan, stack: Stack) -> Plan:
    """The plan with each item's gain in this stack, and without notes of ours about another one."""
    rows = {row.name: row for row in stack.rows}
    items = tuple(_with_gain(item, rows.get(item.name)) for item in plan.items)
    return replace(plan, items=items, notes=tuple(note for note in plan.notes if not note.startswith(OURS)))


def _with_gain(item: PlanItem, row: Row | None) -> PlanItem:
    if row is None or row.gain is None:
        return item
    more = {"gain": round(row.gain, 3), "how": row.how, "origin": "computed"}
    return replace(item, predicted={**item.predicted, **more})


def _whole(ledger: Ledger, stack: Stack) -> Iterable[str]:
    """What all of it comes to, on a machine whose peak is known."""
    if stack.unit != "s":
        return ()
    asked = ledger.request
    size = f"{asked.width}x{asked.height}" + (f"x{asked.frames}" if asked.frames else "")
    before, after = stack.first.total, stack.last.total
    low, high = (short(after * factor) for factor in (1 / stack.spread, stack.spread))
    return (
        f"computed for {size}, {asked.steps} steps on {stack.hardware}: {short(before)} s plain, {short(after)} s "
        f"with all of this ({stack.gain:.2f} times as fast; {low} to {high} s by the rate's 80 % interval alone)",
    )


# ---- memory ------------------------------------------------------------------------------------------------------


def _memory(plan: Plan, ledger: Ledger, stack: Stack, target: Target) -> Iterable[str]:
    """What is needed where, whether it fits, and if not what would."""
    machine = target.hardware
    limit = plan.budget.memory_gib or machine.memory_gib
    if limit is None or not machine.may.own_memory:
        return ()
    need = stack.last.need_gib
    host = host_gib(stack.last)
    there = f", and {host:.1f} GiB of the host" if host else ""
    told = f"memory, computed: {need:.1f} GiB of {limit:g} on the device{there}"
    if need <= limit:
        return (told,)
    ways = remedies(ledger, plan, machine, lambda account: account.need_gib, limit, "GiB")
    return (f"{told}: {need - limit:.1f} GiB short; {ways}",)


def host_gib(account: Account) -> float:
    """Weights that wait on the host."""
    if account.place == "by stage":
        return sum(account.weights_gib.values())
    return max(0.0, account.denoiser_gib - account.live_gib) if account.place == "by layer" else 0.0


# ---- time --------------------------------------------------------------------------------------------------------


def _too_slow(plan: Plan, ledger: Ledger, stack: Stack, target: Target) -> Iterable[str]:
    """By how much seconds that were asked for are missed, and what would keep them."""
    limit = plan.budget.max_seconds
    if limit is None or stack.unit != "s":
        return ()
    last = stack.last.total - stack.last.decode  # the budget ends with the last step
    if last <= limit:
        return ()
    ways = remedies(ledger, plan, target.hardware, lambda account: account.total - account.decode, limit, "s")
    return (f"max_seconds={limit:g}, computed: {short(last)} s, {short(last - limit)} s too long; {ways}",)
