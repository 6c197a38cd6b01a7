"""Is a tuned schedule above the adaptive cache at equal computed steps? 32 held-out prompts, paired.

    python benchmarks/tuned.py                          # every world that has weights, 14 and 9 of 28, float32
    python benchmarks/tuned.py --worlds image --dtype bfloat16 --prompts 8

Per world: `diffaccel.tune.search` on 8 training prompts; then, on held-out prompts, the tuned schedule, and the
adaptive cache (every prompt by itself) at the tolerance whose mean number of computed steps is nearest to, and not
below, the schedule's, found by halving the interval of log tolerance on those very prompts: the comparison favours
the adaptive cache. `lead_db` is the mean of tuned - adaptive, `lead_interval_db` its 95 % interval by bootstrap over
prompts, and `met` says whether that lies above 0.

A row at a time goes into tuned_WORLD_DTYPE.journal in --out, from where the same command goes on. Prints one JSON
document and writes it to tuned.json in --out. Times mean nothing here, figures do: a busy machine will do.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffaccel import testbed, tune
from diffaccel.quality.bootstrap import paired
from diffaccel.testbed.bundle import KINDS, folder_of
from diffaccel.tune.calibrate import wishes_for
from diffaccel.tune.job import versions
from diffaccel.tune.journal import Journal
from diffaccel.tune.outcome import figures_of
from diffaccel.tune.runs import Ground, Trial, text_of

TOLERANCES = (1e-5, 0.3)  # between these every number of computed steps lies
HALVINGS = 7


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Rows:
    """Trials by name, from the journal where they are known."""

    def __init__(self, path: Path, heading: dict[str, Any]) -> None:
        self.journal = Journal(path, heading)

    def trial(self, key: str, run: Callable[[], Trial]) -> Trial:
        if key not in self.journal.rows:
            self.journal.add(key, vars(run()))
        row = self.journal.rows[key]
        say(f"{key}: {sum(row['psnr_db']) / len(row['psnr_db']):.2f} dB at {row['computed']:.2f} steps")
        return Trial(tuple(row["psnr_db"]), tuple(row["ssim"]), row["computed"], row["seconds"])


def adaptive(rows: Rows, ground: Ground, steps: int, computed: int) -> tuple[float, Trial]:
    """The tolerance whose mean number of computed steps is nearest to `computed` from above, and its trial."""

    def at(tolerance: float) -> Trial:
        wishes = wishes_for(tolerance, steps)
        return rows.trial(f"adaptive {tolerance:.3g}", lambda: ground.one_by_one().accelerated(wishes))

    low, high = (math.log(value) for value in TOLERANCES)
    best: tuple[float, Trial] | None = None
    for _ in range(HALVINGS):
        tolerance = float(f"{math.exp((low + high) / 2):.3g}")
        trial = at(tolerance)
        if trial.computed >= computed:
            low = math.log(tolerance)
            if best is None or trial.computed <= best[1].computed:
                best = tolerance, trial
        else:
            high = math.log(tolerance)
    if best is None:
        best = TOLERANCES[0], at(TOLERANCES[0])
    return best


def world(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """The comparison on one testbed."""
    pipe = testbed.load(kind, torch_dtype=getattr(torch, args.dtype))
    pipe.set_progress_bar_config(disable=True)
    call = {**testbed.call_kwargs(kind), "num_inference_steps": args.steps}
    name = f"tuned_{kind}_{args.dtype}"
    found = tune.search(
        pipe,
        testbed.prompts("train", args.search_prompts, kind=kind),
        args.computed,
        batch=args.batch,
        runs=args.runs,
        journal=args.out / f"{name}_search.journal",
        say=say,
        **call,
    )
    prompts = testbed.prompts("test", args.prompts, kind=kind)
    ground = Ground(pipe, prompts, range(len(prompts)), call, args.batch)
    rows = Rows(args.out / f"{name}.journal", {"kind": kind, "dtype": args.dtype, "prompts": prompts, "call": call})
    out = []
    with torch.no_grad():
        for setting in found.settings:
            key = f"tuned {text_of(setting.mask)} {setting.method.order} {setting.method.correct}"
            ours = rows.trial(
                key,
                lambda s=setting: ground.schedule(s.mask, s.method, s.coordinate),  # type: ignore[misc]
            )
            tolerance, theirs = adaptive(rows, ground, args.steps, setting.computed)
            lead = paired(ours.psnr_db, theirs.psnr_db)
            out.append(
                {
                    "computed": setting.computed,
                    "schedule": text_of(setting.mask),
                    "method": str(setting.method),
                    "tuned": figures_of(ours),
                    "adaptive": {"tolerance": tolerance, "computed": round(theirs.computed, 2), **figures_of(theirs)},
                    "lead_db": round(lead.mean, 2),
                    "lead_interval_db": lead.to_list(),
                    "met": lead.excludes_zero and lead.mean > 0,
                    "rivals_on_searched_prompts": setting.against(),
                }
            )
    return {"kind": kind, "prompts": len(prompts), "searched_prompts": len(found.origin["prompts"]), "settings": out}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tuned schedules against the adaptive cache at equal computed steps.")
    trained = [kind for kind in KINDS if (folder_of(kind) / "model_index.json").is_file()]
    parser.add_argument("--worlds", nargs="+", default=trained, choices=trained)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--computed", type=int, nargs="+", default=[14, 9])
    parser.add_argument("--search-prompts", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32, help="held out")
    parser.add_argument("--runs", type=int, default=24, help="real runs of the search")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    args, began = parser.parse_args(), time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    document = {
        "label": "testbed only",
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "versions": versions(),
        "worlds": [world(args, kind) for kind in args.worlds],
        "seconds": round(time.perf_counter() - began),
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    (args.out / "tuned.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
