"""The report as one HTML page that needs nothing else: tables, steps, stages, pictures, plans, the machine."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..planner.plan import Plan
from . import svg
from .pictures import apart, data_uri
from .rows import HEAD, floor_row, lead_rows, row

_STYLE = """
body { font: 14px/1.5 sans-serif; color: #1c1c1c; background: #fff; margin: 2em; max-width: 80em }
table { border-collapse: collapse; margin: .5em 0 } td, th { padding: .2em .7em; text-align: right }
td:first-child, th:first-child { text-align: left } tr + tr td { border-top: 1px solid #ddd }
.plan td { text-align: left } .grid td, .grid th { text-align: left; vertical-align: top; border: 0 }
img { image-rendering: pixelated; min-width: 96px } .faint { color: #6b6b6b } pre { white-space: pre-wrap }
"""
_PICTURES = 4  # prompts in the grid


def page(told: Mapping[str, Any], pictures: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """The whole page of a document, with the pictures [P, ...] by size and contender."""
    parts = [
        f"<h1>{_esc(told['pipeline'])}</h1><p>{_esc(_about(told))}</p>",
        tables(told),
        *(_steps(bucket) for bucket in told["buckets"]),
        *(
            _grid(bucket["size"], told, pictures[bucket["size"]])
            for bucket in told["buckets"]
            if bucket["size"] in pictures
        ),
        *_plans(told["buckets"][0]["contenders"]),
        f"<h2>Machine</h2>{_machine(told['environment'])}",
        f"<details><summary>call</summary><pre>{_esc(json.dumps(told['call'], indent=1))}</pre></details>",
    ]
    title = _esc(f"diffaccel bench: {told['pipeline']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def tables(told: Mapping[str, Any]) -> str:
    """One table per size, the noise floor as its last line."""
    out = []
    for bucket in told["buckets"]:
        rows = [row(one) for one in bucket["contenders"]]
        refused = [f"{one['name']}: {one['refused']}" for one in bucket["contenders"] if one["refused"]]
        out.append(f"<h2>{_esc(bucket['size'])}</h2>" + table([HEAD, *rows, floor_row(bucket)]))
        pairs = lead_rows(bucket)
        out += [table([("paired by prompt", "PSNR"), *pairs])] if pairs else []
        out += [f'<p class="faint">{_esc(text)}</p>' for text in refused]
    return "".join(out)


def table(rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Rows as HTML, the first one as headings."""
    head, *body = rows
    lines = ["".join(f"<th>{_esc(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{_esc(cell)}</td>" for cell in cells) for cells in body]
    return f'<table class="{kind}">' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _about(told: Mapping[str, Any]) -> str:
    return (
        f"{told['dtype']}, {len(told['prompts'])} prompts, {told['rounds']} rounds of A B B A, {told['level']:.0%} "
        "intervals (fidelity over prompts, speed over rounds). Speed is the plain pipeline's seconds over the plan's; "
        "fidelity is against the plain pipeline's pictures of the same noise. The noise floor is how far two plain "
        "runs are apart that differ in rounding alone: nothing beyond it can be seen."
    )


def _steps(bucket: Mapping[str, Any]) -> str:
    """Hit map, seconds by step and stages of every contender."""
    ran = [one for one in bucket["contenders"] if not one["refused"]]
    longest = max((sum(one["stages_s"].values()) for one in ran), default=0.0)
    rows = []
    for one in ran:
        rows.append(
            f"<tr><th>{_esc(one['name'])}</th><td>{svg.hit_map(one['hits'])}<br>{svg.step_bars(one['steps_s'])}</td>"
            f"<td>{svg.stage_bar(one['stages_s'], longest)}<br>{_esc(_stages(one['stages_s']))}<br>"
            f"{_esc(_memory(one['memory']))}</td></tr>"
        )
    head = "<tr><th></th><th>steps: blue computed, yellow reused; seconds of each</th><th>stages, memory</th></tr>"
    return f'<h2>Steps at {_esc(bucket["size"])}</h2><table class="grid">{head}{"".join(rows)}</table>'


def _stages(stages: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in stages.items())


def _memory(memory: Mapping[str, Any]) -> str:
    words = {"peak_bytes": "peak", "weights_bytes": "weights", "cache_bytes": "caches"}
    known = [f"{word} {memory[key] / 2**20:.4g} MiB" for key, word in words.items() if memory[key] is not None]
    return ", ".join(known)


def _grid(size: str, told: Mapping[str, Any], pictures: Mapping[str, np.ndarray]) -> str:
    """Per prompt a row: plain, then each contender and its difference from plain."""
    baseline = next(one["name"] for one in told["buckets"][0]["contenders"] if one.get("baseline"))
    plain, count = pictures[baseline], min(_PICTURES, len(told["prompts"]))
    others = {name: shown for name, shown in pictures.items() if name != baseline}
    differences = {name: apart(plain, shown) for name, shown in others.items()}
    heads = [baseline]
    for name in others:
        heads += [name, f"difference x {differences[name][1]:g}"]
    lines = ["<tr><th></th>" + "".join(f"<th>{_esc(head)}</th>" for head in heads) + "</tr>"]
    for at in range(count):
        row = [plain[at]]
        for name, shown in others.items():
            row += [shown[at], differences[name][0][at]]
        cells = "".join(
            f'<td><img alt="{_esc(head)}" src="{data_uri(picture)}"></td>'
            for head, picture in zip(heads, row, strict=True)
        )
        lines.append(f"<tr><th>{_esc(told['prompts'][at])}</th>{cells}</tr>")
    return f'<h2>Pictures at {_esc(size)}</h2><table class="grid">{"".join(lines)}</table>'


def _plans(contenders: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    planned = [one for one in contenders if not one["refused"] and one["plan"]]
    if planned:
        yield "<h2>Plans</h2>"
    for one in planned:
        rows = Plan.from_dict(one["plan"]).rows()
        notes = "".join(f'<p class="faint">{_esc(note)}</p>' for note in one["notes"])
        yield f"<details open><summary>{_esc(one['name'])}</summary>{table(rows, 'plan')}{notes}</details>"


def _machine(environment: Mapping[str, Any]) -> str:
    return table([("", ""), *((name, str(value)) for name, value in environment.items())])


def _esc(text: object) -> str:
    return html.escape(str(text))
