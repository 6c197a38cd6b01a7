"""`diffaccel doctor`: what is wrong with this machine, or a pipeline on it. Exit code 1 where a fault was found."""

from __future__ import annotations

import argparse
import json
from typing import Any

from . import hush_libraries
from .given import TESTBED, load_pipeline, size, whole

NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pipeline", metavar="MODEL", help=f"a folder of a diffusers pipeline, or {TESTBED}KIND")
    add("--preset", metavar="PRESET", help="accelerate it so, and examine that (no lever is tried alone then)")
    add("--levers", default="all", metavar="NAMES", help="plan items to try one by one, with commas; all, or none")
    add("--prompt", metavar="TEXT", help="what to make in the short runs")
    add("--steps", type=whole(1), metavar="N", help="of a run (12)")
    add("--size", type=size, metavar="WxH[xF]", help="pixels and frames of a run (the pipeline's default)")
    add("--memory-gib", type=float, metavar="GIB", help="take this for the memory of the device")
    add("--hardware", metavar="NAME", help="judge the kernels for this machine, e.g. h100 (the one here)")
    add("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    hush_libraries()
    from .. import accelerate, doctor

    pipe: Any = None
    more: dict[str, Any] = {}
    if args.pipeline is not None:
        pipe, call = load_pipeline(args.pipeline, args.size)
        given = {"prompt": args.prompt, "num_inference_steps": args.steps}
        more["call"] = call | {name: value for name, value in given.items() if value is not None}
        more["memory_gib"] = args.memory_gib
        if args.preset is not None:
            accelerate(pipe, args.preset)
        elif args.levers != NONE:
            more["levers"] = "all" if args.levers == "all" else args.levers.split(",")
    found = doctor.check(pipe, hardware=args.hardware, **more)
    print(json.dumps(found.to_dict(), indent=2, allow_nan=False) if args.json else found)
    return 0 if found.healthy else 1
