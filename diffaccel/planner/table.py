"""A plan as a table of text, at most 120 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

from .levers import PLACES

if TYPE_CHECKING:
    from .plan import PlanItem

WIDTH = 120
GAIN = 26  # columns
# Of a measurement: what it gains and keeps. The counts of a run stand with the reason.
MEASURED = ("speed", "psnr_db", "psnr_lowest_db", "ssim", "identical", "prompts", "items_together")
FOR_THE_LEDGER = ("gain", "how", "parameters_skipped", "product_bits", "score_bits", "value_bits")  # told otherwise
HEAD = ("item", "state", "fidelity", "gain", "why / setting")


def rows(items: Iterable[PlanItem]) -> list[tuple[str, ...]]:
    """Header and rows."""
    return [HEAD, *(_row(item) for item in items)]


def _row(item: PlanItem) -> tuple[str, ...]:
    on = item.status == "enabled"
    return item.name, item.status, item.fidelity if on else "-", gain(item) if on else "-", _why(item)


def page(title: str, rows: Sequence[Sequence[str]], notes: Iterable[str]) -> str:
    """Title, table and notes, each wrapped."""
    widths = [max(len(row[i]) for row in rows) for i in range(3)] + [min(GAIN, max(len(row[3]) for row in rows))]
    last = WIDTH - 2 - sum(widths) - 2 * len(widths)
    lines = textwrap.wrap(title, WIDTH, subsequent_indent="  ")
    for row in rows:
        cells = [[cell] for cell in row[:3]] + [textwrap.wrap(row[3], widths[3]), _wrapped(row[4], last)]
        for at in range(max(map(len, cells))):
            parts = [
                (cell[at] if at < len(cell) else "").ljust(wide)
                for cell, wide in zip(cells, [*widths, 0], strict=True)
            ]
            lines.append(("  " + "  ".join(parts)).rstrip())
    for note in notes:
        lines += textwrap.wrap(f"note: {note}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _wrapped(text: str, wide: int) -> list[str]:
    return textwrap.wrap(text, wide, break_on_hyphens=False) or [""]


def gain(item: PlanItem) -> str:
    """Gains in time with their origins; "unmeasured" where there is none of any."""
    told = []
    if "gain" in item.predicted:
        told.append(f"{_times(item.predicted['gain'])} {item.predicted.get('origin', '?')}")
    if item.published:
        of = f" ({item.published['of']})" if item.published.get("of") else ""
        told.append(f"{_times(item.published.get('gain'))} published{of}")
    measured = {key: value for key, value in (item.measured or {}).items() if key in MEASURED}
    if measured:
        told.append(_listed({**measured, "origin": "measured"}))
    return "; ".join(told) or "unmeasured"


def _times(value: object) -> str:
    return f"{value:.2f}x" if isinstance(value, (int, float)) else str(value)


def _listed(values: Mapping[str, object]) -> str:
    """Names and values, and their origin."""
    told = [f"{key} {value}" for key, value in values.items() if key != "origin"]
    return f"{', '.join(told)} ({values.get('origin', '?')})" if told else str(values.get("origin", ""))


def _why(item: PlanItem) -> str:
    """Setting, reason, what is computed beside the gain and how, and what is published."""
    if item.status != "enabled":
        return item.reason
    usual = _defaults(item.name)
    setting = ", ".join(
        f"{key}={value}" for key, value in item.params.items() if key not in usual or usual[key] != value
    )
    more = {key: value for key, value in item.predicted.items() if key not in FOR_THE_LEDGER}
    told = [setting, item.reason, str(item.predicted.get("how", ""))]
    counted = {key: value for key, value in (item.measured or {}).items() if key not in MEASURED}
    told += [_listed(values) for values in (more, counted) if set(values) - {"origin"}]
    if item.published:
        quoted = "; ".join(str(item.published[key]) for key in ("what", "source") if item.published.get(key))
        told.append(f"published: {quoted}")
    return "; ".join(part for part in told if part)


def _defaults(name: str) -> dict[str, object]:
    """Parameters of an item that say nothing: those of its lever as it comes. Empty for an item of no lever here."""
    key = name.partition(".")[0]
    place = PLACES.get("vae_tiling" if name == "vae.tiling" else key)
    value = (
        None if place is None else next((v for v in place.values if v is not False and place.item(v) == name), None)
    )
    if place is None or value is None or str(value) not in place.levers:
        return {}
    found = {}
    for field in fields(place.levers[str(value)].config()):
        if field.default is not MISSING:
            found[field.name] = field.default
    return found
