"""`diffaccel presets`: the names of the presets, or the text of one."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this preset instead of the list")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from diffaccel import presets

    found = presets() if args.name is None else presets(args.name)
    if args.json:
        document = {"presets": found} if args.name is None else {"name": args.name, "text": found}
        print(json.dumps(document, indent=2))
    else:
        print(found.rstrip() if isinstance(found, str) else "\n".join(found))
    return 0
