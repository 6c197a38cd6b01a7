"""What `print(pipe.acceleration)` shows: one short line per item (what, state, gain, reason), and all the rest in
`print(pipe.acceleration.details)`."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

from ..core.report import RunReport
from .plan import Plan, PlanItem

HEAD = ("item", "state", "gain", "reason")
WIDEST = 100  # characters of a reason in the short table
UNMEASURED = "unmeasured"


def gain(item: PlanItem, hit_rate: float | None = None) -> str:
    """What an item is known to bring, with nothing promised: measured speed and PSNR, else the share of calls that a
    cache left out in the last run, else "unmeasured"; "-" where it is off."""
    if item.status != "enabled":
        return "-"
    measured = item.measured or {}
    parts = []
    if isinstance(speed := measured.get("speed"), (int, float)):
        parts.append(f"{speed:.2f}x")
    if isinstance(psnr := measured.get("psnr_db"), (int, float)):
        parts.append(f"{psnr:.1f} dB")
    elif measured.get("identical"):
        parts.append("same bits")
    if not parts and hit_rate is not None and item.name.startswith("cache."):
        parts.append(f"{hit_rate:.0%} reused")
    return ", ".join(parts) or UNMEASURED


def rows(plan: Plan, hit_rate: float | None = None) -> list[tuple[str, ...]]:
    """Header and one row per item."""
    return [HEAD, *((item.name, item.status, gain(item, hit_rate), item.reason) for item in plan.items)]


def _title(plan: Plan) -> str:
    level = "" if plan.level is None else f", level {plan.level}"
    return f"{plan.pipeline} ({plan.family}), {plan.hardware}, preset {plan.preset}{level}"


def _clip(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def summary(plan: Plan, hit_rate: float | None = None) -> str:
    """The short table as text."""
    table = rows(plan, hit_rate)
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    lines = [f"diffaccel: {_title(plan)}"]
    for row in table:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"  {cells}  {_clip(row[3])}".rstrip())
    if len(table) == 1:
        lines.append("  nothing is on")
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join([*lines, "  parameters: print(pipe.acceleration.details)"])


def _html(table: Sequence[Sequence[str]]) -> str:
    tags = ["th", *["td"] * (len(table) - 1)]
    lines = ("".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) for tag, row in zip(tags, table, strict=True))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


class Details:
    """Everything a plan has of each item: parameters in force, what was predicted, published, measured.

    `costed` gives the plan with what the ledger computes, where that is asked for."""

    def __init__(self, plan: Plan, report: RunReport | None = None, costed: Callable[[], Plan] | None = None) -> None:
        self.plan, self._costed = plan, costed
        self.hit_rate = None if report is None else report.hit_rate

    def short(self) -> str:
        """The short table as text."""
        return summary(self.plan, self.hit_rate)

    def short_html(self) -> str:
        """The short table as HTML, parameters folded in."""
        head, notes = html.escape(_title(self.plan)), (f"<p>note: {html.escape(n)}</p>" for n in self.plan.notes)
        more = f"<details><summary>parameters</summary>{self._repr_html_()}</details>"
        return f"<div><b>{head}</b>{_html(rows(self.plan, self.hit_rate))}{''.join(notes)}{more}</div>"

    def rows(self) -> list[tuple[str, str, str]]:
        """(item, what, value), one row per number."""
        found: list[tuple[str, str, str]] = []
        for item in (self._costed() if self._costed is not None else self.plan).items:
            found.append((item.name, "state", f"{item.status}, {item.slot}, {item.fidelity}"))
            found += [(item.name, "reason", item.reason)] if item.reason else []
            found += [(item.name, name, str(value)) for name, value in item.params.items()]
            quoted = item.published or {}
            for kind, values in (
                ("predicted", item.predicted),
                ("published", quoted),
                ("measured", item.measured or {}),
            ):
                found += [(item.name, f"{kind} {name}", str(value)) for name, value in _numbers(values).items()]
        return found

    def __str__(self) -> str:
        lines, last = [_title(self.plan)], ""
        table = self.rows()
        width = max((len(what) for _, what, _ in table), default=0)
        for item, what, value in table:
            lines += [item] if item != last else []
            lines.append(f"  {what.ljust(width)}  {value}")
            last = item
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _html([("item", "what", "value"), *self.rows()])


def _numbers(values: Mapping[str, object]) -> Mapping[str, object]:
    """Nothing where no more is known than that nothing is."""
    return {} if set(values) == {"origin"} else values
