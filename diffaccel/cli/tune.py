"""`diffaccel tune`: search the steps that are worth computing, for one pipeline, and write them down as presets."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import hush_libraries
from .given import TESTBED, load_pipeline, number, pair, prompts_of, say, size, whole

_RIVALS = ("own", "euler", "unipc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pipeline", metavar="PIPELINE", help="a folder, FILE.py that builds a pipeline, or testbed:KIND")
    add("--computed", type=whole(2), nargs="+", metavar="N", help="numbers of computed steps (half and a third)")
    add("--min-psnr", type=number, nargs="+", default=[], metavar="DB", help="or: the fewest steps that reach this")
    add("--steps", type=whole(3), metavar="N", help="steps of the plain run (the pipeline's own number)")
    add("--prompts", metavar="FILE", help="prompts to search on, one a line (the first 8); testbed: or a number (8)")
    add("--held-out", metavar="FILE", help="prompts to measure the result on; testbed: or a number (none)")
    add("--size", type=size, metavar="WxH[xF]", help="size of the pictures (the pipeline's own)")
    add("--call", type=pair, action="append", default=[], metavar="NAME=VALUE", help="an argument of the pipeline")
    add("--seed", type=whole(0), default=0, metavar="N", help="seed of the first prompt (0)")
    add("--batch", type=whole(1), default=1, metavar="N", help="prompts that run at once (1)")
    add("--runs", type=whole(1), default=24, metavar="N", help="real runs at most, all prompts once each (24)")
    add("--max-minutes", type=number, metavar="M", help="no run begins later")
    add("--rivals", nargs="*", choices=_RIVALS, default=_RIVALS, help="fewer steps that compete (own euler unipc)")
    add("--calibrate", action="store_true", help="also calibrate the adaptive cache's tolerance to PSNR")
    add("--out", type=Path, default=Path("tuned"), metavar="DIR", help="folder for presets and journal (tuned)")
    add("--json", action="store_true", help="print one JSON document")
    add("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    hush_libraries()
    from .. import Budget
    from ..errors import InvalidOptionError
    from ..tune import search
    from ..tune.calibrate import TOLERANCES

    given = args.prompts if args.prompts or not args.pipeline.startswith(TESTBED) else "8"
    prompts = prompts_of(given, "--prompts", args.pipeline, "train")
    if not prompts:
        raise InvalidOptionError("--prompts FILE is missing: what the pipeline is to be tuned on, one prompt a line")
    held_out = prompts_of(args.held_out, "--held-out", args.pipeline, "test")
    pipe, call = load_pipeline(args.pipeline, args.size)
    call |= dict(args.call) | ({} if args.steps is None else {"num_inference_steps": args.steps})
    if args.pipeline.startswith(TESTBED):
        call.setdefault("num_inference_steps", 28)
    budgets = [*(args.computed or []), *(Budget(min_psnr_db=value) for value in args.min_psnr)]
    try:
        found = search(
            pipe, prompts, budgets or None, seeds=args.seed, held_out=held_out, batch=args.batch, runs=args.runs,
            max_minutes=args.max_minutes, rivals=args.rivals,
            tolerances=TOLERANCES if args.calibrate else (), journal=args.out / "journal.json", out=args.out,
            say=None if args.quiet else say, **call,
        )  # fmt: skip
    except KeyboardInterrupt:
        print(f"diffaccel: what is done lies in {args.out}; the same command goes on from there", file=sys.stderr)
        raise
    written = sorted(map(str, args.out.glob("tuned-*.toml")))
    if args.json:
        print(json.dumps({**found.to_dict(), "written": written}, indent=2, allow_nan=False))
    else:
        print("\n".join([str(found), *written]))
    return 0
