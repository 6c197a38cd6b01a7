"""A plan as it stands after a run: what was measured, who stood down, whose place was taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.report import RunReport
from .plan import Plan, PlanItem

if TYPE_CHECKING:
    from ..quality.measurement import Measurement


def in_force(
    plan: Plan, report: RunReport | None, displaced: Mapping[str, str], measured: Measurement | None = None
) -> Plan:
    """The plan whose items carry what the last run and `measure` measured, and who has taken their place since (by
    item)."""
    items = plan.items if report is None else tuple(_measured(item, report) for item in plan.items)
    items = tuple(
        replace(item, reason=f"stands down: {displaced[item.name]}") if item.name in displaced else item
        for item in items
    )
    plan = replace(plan, items=items)
    return plan if measured is None else plan.with_measured(measured.summary())


def _measured(item: PlanItem, report: RunReport) -> PlanItem:
    """A plan item with what the last run measured, and why it stood down if it did."""
    if item.status != "enabled" or item.name not in report.stats:
        return item
    down = next((note for note in report.notes if note.startswith(f"{item.name} stood down")), None)
    return replace(
        item,
        measured={**report.stats[item.name], "origin": "measured"},
        reason=f"in the last run, {down}" if down else item.reason,
    )
