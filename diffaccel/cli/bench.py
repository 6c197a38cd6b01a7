"""`diffaccel bench`: plans in turn on one pipeline; speed and fidelity with intervals, a report, a check."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import hush_libraries
from .given import TESTBED, load_source, pair, prompts_of, say, size, whole

if TYPE_CHECKING:
    from ..bench.sources import Source

WORSE = 4  # exit code: a regression
_PLANS = ("auto", "auto,level=fast")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    common(parser)
    add("--plan", action="append", default=[], metavar="PLAN", help=f"what to measure beside plain; more than once: a "
        f"preset, FILE.toml, KEY=VALUE,..., or plain,steps=N ({' and '.join(_PLANS)})")  # fmt: skip
    add("--rounds", type=whole(1), default=10, metavar="N", help="rounds of A B B A (10)")
    add(
        "--batch",
        type=whole(1),
        default=1,
        metavar="N",
        help="prompts per call of the rounds for throughput (1: none)",
    )
    add("--sizes", type=size, nargs="+", default=[], metavar="WxH[xF]", help="buckets (the pipeline's own size)")
    add("--floor", type=whole(0), default=2, metavar="N", help="prompts on which the noise floor is taken (2)")
    add("--against", type=Path, metavar="FILE.json", help="fail (exit code 4) where it is worse than this document")
    add("--out", type=Path, metavar="DIR", help="write bench.json and bench.html into this folder")
    add(
        "--determinism", action="store_true", help="instead: are runs that should be the same bit-equal? (--plan: one)"
    )


def common(parser: argparse.ArgumentParser) -> None:
    """What `bench` and `sweep` are both given."""
    add = parser.add_argument
    add("pipeline", metavar="PIPELINE", help="a folder, FILE.py[:FUNCTION] that builds one, or testbed:KIND")
    add("--prompts", metavar="FILE", help="prompts, one a line; testbed: or a number (4)")
    add("--steps", type=whole(1), metavar="N", help="steps of the plain run (testbed: 28; else the pipeline's own)")
    add("--call", type=pair, action="append", default=[], metavar="NAME=VALUE", help="an argument of the pipeline")
    add("--seed", type=whole(0), default=0, metavar="N", help="seed of the first prompt (0)")
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu: seconds of this process, on busy CPUs (wall)")
    add("--json", action="store_true", help="print one JSON document")
    add("--quiet", action="store_true", help="no progress on stderr")


def source_of(args: argparse.Namespace) -> tuple[Source, list[str], dict[str, Any]]:
    """The pipeline, prompts and call of the arguments of `common`."""
    from ..errors import InvalidOptionError

    is_testbed = args.pipeline.startswith(TESTBED)
    given = args.prompts if args.prompts or not is_testbed else "4"
    prompts = prompts_of(given, "--prompts", args.pipeline, "test")
    if not prompts:
        raise InvalidOptionError("--prompts FILE is missing: what is to be generated, one prompt a line")
    hush_libraries()
    source = load_source(args.pipeline)
    steps = args.steps or (28 if is_testbed else None)
    call = source.call | ({} if steps is None else {"num_inference_steps": steps}) | dict(args.call)
    return source, prompts, call


def clock_of(args: argparse.Namespace) -> Callable[[], float]:
    """The clock that was asked for."""
    return time.process_time if args.clock == "cpu" else time.perf_counter


def run(args: argparse.Namespace) -> int:
    from ..bench.result import read

    stored = None if args.against is None else read(args.against)  # before anything runs
    source, prompts, call = source_of(args)
    if args.determinism:
        return _determinism(args, source, prompts, call)
    from ..bench import bench

    result = bench(
        source.pipe, args.plan or list(_PLANS), prompts, seeds=args.seed, rounds=args.rounds, batch=args.batch,
        sizes=args.sizes, floor=args.floor, score=source.score, clock=clock_of(args),
        say=quiet if args.quiet else say, **call,
    )  # fmt: skip
    files = {} if args.out is None else result.save(args.out)
    changed = () if stored is None else result.against(stored)
    if args.json:
        told = result.to_dict() | {"files": files, "changes": [vars(change) for change in changed]}
        print(json.dumps(told, indent=1, allow_nan=False))
    else:
        print("\n".join([str(result), "", *map(str, changed), *files.values()]).rstrip())
    worse = [change for change in changed if change.worse]
    for change in worse if args.json else ():
        print(f"diffaccel: {change}", file=sys.stderr)
    return WORSE if worse else 0


def _determinism(args: argparse.Namespace, source: Source, prompts: list[str], call: dict[str, Any]) -> int:
    """The table of findings, or with --json {"determinism": [...]}."""
    from ..bench.same import determinism, plain_data, table
    from ..errors import InvalidOptionError

    if len(args.plan) > 1:
        raise InvalidOptionError(f"--determinism looks at one plan, got {len(args.plan)}")
    wish = args.plan[0] if args.plan else None
    found = determinism(source.pipe, prompts, wish=wish, seed=args.seed, source=args.pipeline, **call)
    print(json.dumps({"determinism": plain_data(found)}, indent=1) if args.json else table(found))
    return 0


def quiet(line: str) -> None:
    """Nothing is said."""
