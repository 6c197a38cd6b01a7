"""Step schedules for a testbed, searched by `diffaccel.tune`, in the form that cache_settings.py reads.

    python benchmarks/search_schedule.py                                   # 14 and 9 of 28
    python benchmarks/search_schedule.py --kind video --prompts 4 --test-prompts 8

The search runs on TRAINING prompts; held-out figures are on others. It is made twice, with corrections and without,
since peers take steps without one. What is done lies in journals in --out, and the same command goes on from there.
Prints one JSON document and writes it to search_schedule_KIND.json in --out (masks as strings of 0 and 1,
1 = computed; every argument, the seed among them). Masks belong to this testbed, step count and sigma schedule.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from diffaccel import testbed, tune
from diffaccel.testbed.bundle import KINDS
from diffaccel.tune.runs import text_of


def searched(args: argparse.Namespace, corrections: tuple[int, ...]) -> list[dict[str, Any]]:
    """One row per number of computed steps; "refined": the one to take, of both searches."""
    pipe = testbed.load(args.kind)
    pipe.set_progress_bar_config(disable=True)
    tag = "-corrected" if any(corrections) else ""
    found = tune.search(
        pipe,
        testbed.prompts("train", args.prompts, kind=args.kind),
        args.computed,
        seeds=args.seed,
        held_out=testbed.prompts("test", args.test_prompts, kind=args.kind),
        batch=args.prompts,
        runs=args.runs,
        rivals=(),
        corrections=corrections,
        journal=args.out / f"search_schedule_{args.kind}{tag}.journal",
        say=lambda line: print(line, file=sys.stderr, flush=True),
        num_inference_steps=args.steps,
        **testbed.call_kwargs(args.kind),
    )
    return [
        {
            "computed": setting.computed,
            "order": setting.method.order,
            "coordinate": setting.coordinate,
            "correct": setting.method.correct,
            "mask": text_of(setting.mask),
            "refined": any(corrections),
            "train_psnr_db": round(setting.searched.mean_db, 2),
            "held_out_psnr_db": round(setting.trial.mean_db, 2),
            "held_out_lowest_db": round(min(setting.trial.psnr_db), 2),
        }
        for setting in found.settings
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Search step schedules for a testbed.")
    parser.add_argument("--kind", default="image", choices=KINDS)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--computed", type=int, nargs="+", default=[14, 9])
    parser.add_argument("--prompts", type=int, default=8, help="training prompts, one batch, at most 8")
    parser.add_argument("--test-prompts", type=int, default=32)
    parser.add_argument("--runs", type=int, default=24, help="real runs of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    args, began = parser.parse_args(), time.perf_counter()
    rows = [row for corrections in ((0,), (0, 1, 2)) for row in searched(args, corrections)]
    document = {
        "label": "testbed only",
        "kind": args.kind,
        "steps": args.steps,
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "dtype": "float32",
        "torch": torch.__version__,
        "train_prompts": args.prompts,
        "held_out_prompts": args.test_prompts,
        "schedules": rows,
        "seconds": round(time.perf_counter() - began),
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    (args.out / f"search_schedule_{args.kind}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
