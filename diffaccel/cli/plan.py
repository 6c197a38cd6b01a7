"""`diffaccel plan`: what a preset would switch on for a pipeline, and why; nothing is run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidOptionError, unknown
from ..ledger.models import knows
from ..ledger.models import names as model_names
from ..planner.presets import known
from ..planner.presets import names as preset_names
from . import hush_libraries
from .costs import require_model, with_costs
from .given import size, whole

TESTBED = "the bundled testbed, not your model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a bundled model, or a folder with or without weights (the testbed)")
    add("--preset", default="auto", metavar="PRESET", help="preset name or TOML file (auto)")
    add("--model", type=Path, dest="folder", metavar="FOLDER", help=argparse.SUPPRESS)  # as it was before MODEL
    add("--hardware", metavar="NAME", help="plan for this machine, e.g. 4090 or cpu (the one here)")
    add("--level", metavar="NAME", help="careful, balanced or fast (the preset's, else balanced)")
    add("--size", type=size, metavar="WxH[xF]", help="say what a picture or clip of this size costs under the plan")
    add("--steps", type=whole(1), metavar="N", help="steps of the sampler, with --size (the model's default)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--toml", action="store_true", help="print TOML, to edit and to give to accelerate()")


def run(args: argparse.Namespace) -> int:
    hush_libraries()
    from diffaccel import plan, testbed

    model, preset = args.folder or args.model, args.preset
    named = args.model is not None and (args.model == "auto" or known(args.model) or args.model.endswith(".toml"))
    if named:  # `diffaccel plan PRESET --model FOLDER`, as it was
        model, preset = args.folder, args.model
        hint = f"diffaccel: {args.model!r} is a preset: write `diffaccel plan MODEL --preset {args.model}`"
        print(hint, file=sys.stderr)
    if args.steps is not None and args.size is None:
        raise InvalidOptionError("--steps wants --size: the two say what a generation costs")
    if args.size is not None:
        require_model(model, "--size")
    if model is None:
        decided = replace(plan(testbed.load("image"), preset, hardware=args.hardware, level=args.level), model=TESTBED)
    else:
        found = _load(model)
        decided = plan(found, preset, hardware=args.hardware, level=args.level)
        decided = decided if decided.model else replace(decided, model=Path(model).resolve().name)
        if args.size is not None:
            decided = with_costs(decided, model, args.size, args.steps, args.hardware)
    if args.json:
        print(json.dumps(decided.to_dict(), indent=2, allow_nan=False))
    else:
        print(decided.to_toml().rstrip() if args.toml else decided)
    return 0


def _load(model: Path | str) -> Any:
    """The pipeline in a folder, if its weights are there; else the folder or name as it is."""
    folder = Path(model)
    if not folder.is_dir():
        if isinstance(model, Path):
            raise FileNotFoundError(f"no diffusers pipeline in {folder} (no model_index.json there)")
        if not knows(model):
            raise unknown("model or preset", model, (*model_names(), *preset_names()))
        return model
    if not any(folder.glob("*/*.safetensors")) and not any(folder.glob("*/*.bin")):
        return folder
    from ..bench.sources import folder as load_folder

    return load_folder(folder)
