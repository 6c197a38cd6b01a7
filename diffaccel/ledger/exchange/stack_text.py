"""A stack of exchanges as a waterfall of text."""

from __future__ import annotations

import textwrap

from ..ledger_text import flops, short
from .stack import Stack

WIDTH, BAR = 120, 20


def amount(value: float, unit: str) -> str:
    """6.22 s, 2.08 P."""
    return f"{short(value)} s" if unit == "s" else flops(value)


def waterfall(stack: Stack) -> str:
    """One line for each exchange: time after it, a bar, its gain, GiB on the device, and how."""
    where = f" on {stack.hardware}" if stack.hardware else ""
    first, last = (amount(account.total, stack.unit) for account in (stack.first, stack.last))
    lines = [f"{stack.model}{where}: {first} to {last}, {stack.gain:.2f} times as fast (computed)"]
    name = max([len("all in bf16"), *(len(row.name) for row in stack.rows)])
    head = f"{'':{name}}  {'time':>8}  {'':{BAR}}  {'gain':>6}  {'GiB':>5}  how"
    lines.append(head)
    start = stack.first
    lines.append(_line("all in bf16", name, start.total, 1.0, "", start.need_gib, "as the ledger has it", stack))
    for row in stack.rows:
        gain = "-" if row.gain is None else f"{row.gain:.2f}x"
        lines.append(_line(row.name, name, row.after, row.after / start.total, gain, row.need_gib, row.how, stack))
    return "\n".join(lines)


def _line(label: str, wide: int, time: float, part: float, gain: str, gib: float, how: str, stack: Stack) -> str:
    bar = "#" * min(BAR, max(1, round(part * BAR)))
    start = f"{label:{wide}}  {amount(time, stack.unit):>8}  {bar:{BAR}}  {gain:>6}  {gib:5.1f}  "
    told = textwrap.wrap(how, WIDTH - len(start)) or [""]
    return "\n".join([start + told[0], *(" " * len(start) + more for more in told[1:])])
