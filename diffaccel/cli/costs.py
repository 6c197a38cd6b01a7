"""What one generation at a size costs with nothing on and with a plan, in words for the plan's notes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import InvalidOptionError
from ..ledger.arithmetic import estimate
from ..ledger.exchange.stack_text import amount
from ..ledger.hardware import Hardware, named
from ..ledger.models import resolve
from ..planner.plan import Plan
from ..planner.pricing import with_gains


def with_costs(plan: Plan, model: str | Path, size: tuple[int, ...], steps: int | None, hardware: str | None) -> Plan:
    """The plan with two notes: seconds (FLOPs where the machine's peak is not known) and GiB, without it and with it.

    Args:
        size: (width, height) or (width, height, frames), pixels; steps: None: the model's default.
    """
    width, height, frames = (*size, None)[:3]
    machine = named(hardware) if hardware is not None else None
    found = resolve(Path(model) if Path(model).is_dir() else str(model))
    book = estimate(found, height, width, frames, steps, hardware=machine)
    stack = book.apply(plan, machine)
    asked = book.request
    shape = f"{asked.width}x{asked.height}" + (f"x{asked.frames}" if asked.frames else "")
    before, after = (amount(account.total, stack.unit) for account in (stack.first, stack.last))
    spread = f", 80 % within a factor of {stack.spread:.2f}" if stack.unit == "s" else ""
    time = f"{shape}, {asked.steps} steps: {before} with nothing on, {after} with this plan (computed{spread})"
    plan = with_gains(plan, stack)  # in place of those of the model's usual size
    return replace(plan, notes=(*plan.notes, time, _memory(stack.first.need_gib, stack.last.need_gib, machine)))


def _memory(before: float, after: float, machine: Hardware | None) -> str:
    text = f"on the device {before:.1f} GiB with nothing on, {after:.1f} GiB with this plan (computed)"
    if machine is None or machine.memory_gib is None:
        return text
    short = after - machine.memory_gib
    verdict = "fits" if short <= 0 else f"is {short:.1f} GiB too much"
    return f"{text}: {verdict} for the {machine.memory_gib:g} of {machine.name}"


def require_model(model: object, option: str) -> None:
    """Raise where there is no model whose configs say what it costs."""
    if model is None:
        raise InvalidOptionError(f"{option} wants MODEL: what a picture of the bundled testbed costs says nothing")
