"""Drawings as SVG text: which steps were computed, seconds by step, and stages. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

COMPUTED, CACHED, INK, FAINT = "#2461c2", "#f5b83d", "#1c1c1c", "#6b6b6b"
STAGES = {"encode": "#8a8a8a", "denoise": COMPUTED, "decode": "#b0507a"}
_CELL, _TALL, _LABEL, _GAP = 14, 16, 110, 4


def hit_map(shares: Mapping[str, Sequence[float]]) -> str:
    """One row per guidance branch, one cell per step: blue where every run computed it, yellow where none did."""
    steps = max((len(row) for row in shares.values()), default=0)
    if not steps:
        return ""
    parts = [_text(_LABEL + i * _CELL, 10, str(i + 1), FAINT) for i in range(0, steps, 5)]
    for number, (branch, row) in enumerate(shares.items()):
        y = 16 + number * (_TALL + _GAP)
        parts.append(_text(0, y + 12, branch, INK))
        for step, share in enumerate(row):
            title = f"step {step + 1}, {branch}: computed in {share:.0%} of the runs"
            parts.append(_box(_LABEL + step * _CELL, y, _CELL - 2, _TALL, _mix(share), title))
    return _svg(_LABEL + steps * _CELL, 16 + len(shares) * (_TALL + _GAP), parts, "steps that were computed")


def step_bars(seconds: Sequence[float]) -> str:
    """A bar per step, as high as its seconds."""
    if not seconds:
        return ""
    high, tall = max(seconds) or 1.0, 48
    parts = [_text(0, 12, f"{high:.3g} s", FAINT), _text(0, tall, "0 s", FAINT)]
    for step, value in enumerate(seconds):
        height = max(1.0, tall * value / high)
        title = f"step {step + 1}: {value:.4g} s"
        parts.append(_box(_LABEL + step * _CELL, tall - height, _CELL - 2, height, COMPUTED, title))
    return _svg(_LABEL + len(seconds) * _CELL, tall + 2, parts, "seconds by step")


def stage_bar(stages: Mapping[str, float], longest: float, wide: int = 360) -> str:
    """Encode, denoise and decode in one bar, as long as its share of the `longest` contender's seconds."""
    parts, x = [], 0.0
    for name, value in stages.items():
        width = wide * value / (longest or 1.0)
        parts.append(_box(x, 0, max(width, 0.5), _TALL, STAGES.get(name, FAINT), f"{name}: {value:.4g} s"))
        x += width
    return _svg(wide, _TALL, parts, "seconds of stages")


def _mix(share: float) -> str:
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (CACHED, COMPUTED)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    body, name = "".join(parts), html.escape(label, quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{name}" font-family="sans-serif" font-size="11">{body}</svg>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"><title>{html.escape(title)}</title></rect>'


def _text(x: float, y: float, text: str, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{html.escape(text)}</text>'
