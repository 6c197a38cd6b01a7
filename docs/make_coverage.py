"""Writes docs/coverage.md: which step cache acts on which family, asked of the planner on tiny pipelines.

Run `python docs/make_coverage.py`; a test keeps the file up to date. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "coverage.md"

INTRODUCTION = """\
# Which step cache acts where

Made by `docs/make_coverage.py`, which asks `plan(pipe, preset=None, cache=NAME)` on a tiny pipeline of every family;
a test keeps this page up to date. ✓: the method acts. A letter: it is left out of the plan with a reason (below;
`strict=True` raises it instead). ○: it is on, but steps aside in every run of this pipeline with its own scheduler.
Nothing is a silent no-op: where a method steps aside in a run, `pipe.acceleration.report.notes` says so.
"""

CALIBRATED = """\
TeaCache and MagCache need numbers calibrated for the checkpoint. The table shows where they act with numbers of your
own (`cache_coefficients=`, `cache_ratios=`); published ones are found by the checkpoint's name, and for any other
checkpoint "auto" is a refusal that says how to calibrate:
"""

ASIDE = """\
In a run, every step cache steps aside, and says so, where the run has fewer than `cache_min_steps` steps, where the
scheduler is of second order (Heun and its like) or gives no noise levels though the method needs them (SeaCache wants
those of flow matching; `coordinate="sigma"` wants any) and where gradients are enabled. Caches that leave blocks out
step aside in calls to which one of these arguments is given, which change from outside what blocks do; caches of the
whole output do so only where such an argument is a tensor from nobody that can be watched ([caching.md](caching.md)):
"""

CONTEXTS = """\
Pipelines that name their guidance branches (`cache_context`) are told apart by those names. In the others, the order
of the denoiser's calls within a scheduler step names them: either way each branch has a state of its own.
"""


def pipelines() -> dict[str, Any]:
    """Builders of all tiny pipelines by name."""
    from tests import tiny
    from tests.models.families.table import FAMILIES, build

    found: dict[str, Any] = {name: lambda name=name: build(name) for name in FAMILIES}
    return found | {"sdxl": lambda: tiny.build("sdxl")}


def gives_context(pipe: Any) -> bool:
    """Does the pipeline open a cache context around its denoiser calls?"""
    return ".cache_context(" in inspect.getsource(type(pipe))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _calibrated() -> str:
    from diffaccel.caching.tables import load_table

    rows = []
    for name, place in (("teacache", "coefficients"), ("magcache", "ratios")):
        models = load_table(name)["models"]
        usable = sorted(key for key, row in models.items() if row.get("calibrated", True))
        rows.append([name, place, ", ".join(usable)])
    return _table(["method", "numbers", "calibrated for"], rows)


def page() -> str:
    """The whole page."""
    from diffaccel import plan
    from diffaccel.caching.methods import METHODS
    from diffaccel.models import lookup
    from tests.caching.coverage import COVERED, OPTIONS, steps_aside

    methods, reasons = sorted(METHODS), dict[str, str]()
    rows, contexts, arguments = [], [], dict[str, str]()
    for name, build in sorted(pipelines().items()):
        pipe = build()
        spec = lookup(pipe)
        cells = []
        for method in methods:
            decision = plan(pipe, preset=None, cache=method, **COVERED, **OPTIONS.get(method, {}))
            [item] = [item for item in decision.items if item.name == f"cache.{method}"]
            if item.status == "enabled":
                cells.append("○" if steps_aside(method, name) else "✓")
            else:
                cells.append(reasons.setdefault(_of_any_family(item.reason, spec.family), _letter(len(reasons))))
        kind = type(pipe).__name__
        rows.append([name, f"{kind} ({spec.family})", *cells])
        contexts.append([kind, "names" if gives_context(pipe) else "order of calls"])
        if spec.stand_down:
            arguments[spec.family] = ", ".join(f"`{argument}`" for argument in spec.stand_down)
    parts = [
        INTRODUCTION,
        _table(["", "pipeline (family)", *methods], rows) + "\n",
        "\n".join(f"- {letter}: {reason}" for reason, letter in reasons.items()) + "\n",
        "## Calibrated numbers\n",
        CALIBRATED,
        _calibrated() + "\n",
        "## Where a method steps aside\n",
        ASIDE,
        _table(["family", "arguments"], [[family, names] for family, names in sorted(arguments.items())]) + "\n",
        "## How guidance branches are told apart\n",
        CONTEXTS,
        _table(["pipeline", "branches by"], [list(row) for row in sorted(set(map(tuple, contexts)))]),
    ]
    return "\n".join(parts) + "\n"


def _of_any_family(reason: str, family: str) -> str:
    """The reason without the family's name, so that families can share it."""
    for part, instead in ((f"{family}: ", ""), ("transformer: ", ""), (f"the family {family}", "its family")):
        reason = reason.replace(part, instead)
    return reason


def _letter(count: int) -> str:
    return chr(ord("a") + count)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    logging.disable(logging.WARNING)
    PAGE.write_text(page())
