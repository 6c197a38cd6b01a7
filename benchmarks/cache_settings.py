"""Our own settings: every registered method at several strengths, as a user would ask for them.

A setting is a set of override keys of `accelerate`. A method that is not registered, or that refuses the pipeline,
shows up in the results with its reason.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache_calibrate import Context, even_steps

from diffaccel import accelerate

KINDS = ("image", "video")

RESULTS = Path(__file__).parent / "results"

ADAPTIVE = frozenset(
    {"first_block", "teacache", "dbcache", "seacache", "easycache", "dicache", "adacache"}
)  # methods whose hits depend on the picture: run one prompt at a time, as a user would


@dataclass(frozen=True)
class Setting:
    """One setting of one of our methods."""

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)  # override keys of `accelerate`
    calibrated: Mapping[str, str] = field(default_factory=dict)  # override key -> what of the Context is its value
    kinds: tuple[str, ...] = ("image", "video")
    steps: tuple[int, ...] = ()  # step counts it is for; empty: any
    origin: str = ""  # the file that says how its steps were found

    @property
    def adaptive(self) -> bool:
        return self.options["cache"] in ADAPTIVE

    def apply(self, pipe: Any, context: Context) -> None:
        """Accelerate `pipe`; DiffaccelError where the method is not there or cannot act."""
        measured = {key: getattr(context, name) for key, name in self.calibrated.items()}
        accelerate(pipe, preset=None, strict=True, **self.options, **measured)


def _one(method: str, tag: str, calibrated: Mapping[str, str] | None = None, **parameters: Any) -> Setting:
    options = {"cache": method, **{f"cache_{key}": value for key, value in parameters.items()}}
    curve = f"{method}-order{parameters['order']}" if parameters.get("order") else method
    return Setting(f"{method}-{tag}", curve, options, calibrated or {})


def _schedule(tag: str, kind: str, steps: str, order: int, correct: int = 0, origin: str = "", **more: Any) -> Setting:
    """Our step schedule; `correct`: the order at which skipped steps are made good (see search_schedule.py)."""
    options = {"cache": "schedule", "cache_steps": steps, "cache_order": order}
    options |= {f"cache_{key}": value for key, value in more.items()}
    if correct:
        options["cache_correct"] = correct
    method = f"schedule-order{order}" + (f"-correct{correct}" if correct else "")
    return Setting(f"schedule-{tag}", method, options, kinds=(kind,), steps=(28,), origin=origin)


@functools.cache
def search_results(kind: str) -> list[dict[str, Any]]:
    """What search_schedule.py found on training prompts and wrote down, with its arguments and seed beside it.

    Good for this testbed, step count and sigma schedule only.
    """
    return json.loads((RESULTS / _searched_file(kind)).read_text())["schedules"]


def _searched_file(kind: str) -> str:
    return f"search_schedule_{kind}.json"


def _searched(kind: str) -> list[Setting]:
    """Every schedule that the search found; "picked" is the one that it takes, by training prompts alone."""
    out = []
    for row in search_results(kind):
        tag = f"searched-{row['computed']}-order{row['order']}"
        tag += (f"-correct{row['correct']}" if row["correct"] else "") + ("-picked" if row["refined"] else "")
        more = {"coordinate": row["coordinate"], "scope": "denoiser"}
        out.append(_schedule(tag, kind, row["mask"], row["order"], row["correct"], _searched_file(kind), **more))
    return out


def settings() -> list[Setting]:
    """The table, methods of one name together."""
    ratios, polynomial = {"cache_ratios": "magnitude_ratios"}, {"cache_coefficients": "polynomial"}
    even = {k: "".join(map(str, even_steps(28, k))) for k in (14, 9)}
    front = {"front_blocks": 1, "warmup_steps": 4, "order": 1}
    return [
        *(_one("first_block", f"{t:g}", threshold=t) for t in (0.06, 0.12, 0.2)),
        *(_one("first_block", f"{t:g}-order1", threshold=t, order=1) for t in (0.12, 0.2)),
        *(_one("dbcache", f"{t:g}-order1", threshold=t, **front) for t in (0.14, 0.28)),
        *(_one("teacache", f"{t:g}", polynomial, threshold=t) for t in (0.02, 0.05)),
        *(_one("magcache", f"{t:g}k{k}", ratios, threshold=t, max_steps=k) for t, k in ((0.12, 4), (0.3, 8))),
        *(_one("easycache", f"{t:g}", threshold=t) for t in (0.05, 0.1)),
        *(_one("dicache", f"{t:g}", threshold=t) for t in (0.1, 0.2)),
        *(_one("seacache", f"{t:g}", threshold=t) for t in (0.1, 0.25)),
        _one("adacache", "two", codebook={1.0: 2}),
        _one("delta_dit", "n2", interval=2),
        *(_one("taylorseer", f"n{n}o1", interval=n, order=1) for n in (2, 3, 4)),
        _one("interval", "n2", interval=2),
        *(_schedule(f"even{k}-order1", kind, even[k], 1, coordinate="sigma") for k in even for kind in KINDS),
        *(_schedule(f"even{k}-correct2", kind, even[k], 1, 2, coordinate="sigma") for k in even for kind in KINDS),
        *(setting for kind in KINDS for setting in _searched(kind)),
    ]


def searched_mask(kind: str, computed: int) -> str:
    """Of so many computed steps the schedule, searched without a correction, that did best on training prompts."""
    rows = [row for row in search_results(kind) if row["computed"] == computed and not row["correct"]]
    if not rows:
        raise LookupError(f"no schedule was searched for {computed} steps of the {kind} testbed")
    return str(max(rows, key=lambda row: row["train_psnr_db"])["mask"])
