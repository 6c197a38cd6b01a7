"""`diffaccel presets`: the presets with a line about each, or the text of one."""

from __future__ import annotations

import argparse
import json

from ..planner import presets  # not by way of diffaccel.presets, which would load torch and diffusers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this preset instead of the list")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.name is not None:
        text = presets.text(args.name)
        print(json.dumps({"name": args.name, "text": text}, indent=2) if args.json else text.rstrip())
        return 0
    told = {name: presets.load(name).description for name in presets.names()}
    if args.json:
        print(json.dumps({"presets": list(told), "descriptions": told}, indent=2))
    else:
        width = max(map(len, told), default=0)
        print("\n".join(f"{name:{width}}  {description}".rstrip() for name, description in told.items()))
    return 0
