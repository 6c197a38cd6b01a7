"""`diffaccel sweep`: one parameter of a plan from careful to bold; a curve of speed and fidelity."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .bench import clock_of, common, quiet, source_of
from .given import say, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    common(parser)
    add("--parameter", required=True, metavar="NAME", help="what is varied: an option of accelerate, or steps")
    add("--values", required=True, nargs="+", type=_value, metavar="VALUE", help="what it is set to, two or more")
    add("--base", metavar="PLAN", help="the plan that it is added to, e.g. cache=first_block or auto (plain)")
    add("--rounds", type=whole(1), default=3, metavar="N", help="rounds of A B B A (3)")
    add("--axis", default="speed", metavar="NAME", help="speed, or computed: the share of steps left out (speed)")
    add("--out", type=Path, metavar="DIR", help="write sweep.json, .csv, .png and .html into this folder")


def run(args: argparse.Namespace) -> int:
    source, prompts, call = source_of(args)
    from ..bench import sweep

    found = sweep(
        source.pipe, args.parameter, args.values, prompts, base=args.base, seeds=args.seed, rounds=args.rounds,
        axis=args.axis, score=source.score, clock=clock_of(args), say=quiet if args.quiet else say, **call,
    )  # fmt: skip
    files = {} if args.out is None else found.save(args.out)
    if args.json:
        print(json.dumps(found.to_dict() | {"files": files}, indent=1, allow_nan=False))
    else:
        print("\n".join([str(found), *files.values()]))
    return 0


def _value(text: str) -> Any:
    """As JSON where it is some, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
