"""`diffaccel export`: a plan as another engine's command or script, and what that engine cannot express."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..engines import ENGINES, export, extras_of
from ..engines.request import Request
from ..errors import InvalidOptionError
from ..ledger.arithmetic import request_of
from ..ledger.models import Model, resolve
from . import hush_libraries
from .given import size, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a bundled model, or a folder with or without weights")
    add("--engine", required=True, choices=sorted(ENGINES), help="what to write for")
    add("--preset", default="auto", metavar="PRESET", help="preset name, or TOML file of a preset or of a plan (auto)")
    add("--hardware", metavar="NAME", help="plan for this machine, e.g. 4090 (the one here)")
    add("--level", metavar="NAME", help="careful, balanced or fast (the preset's, else balanced)")
    add("--size", type=size, metavar="WxH[xF]", help="pixels, and frames of a clip (the model's usual size)")
    add("--steps", type=whole(1), metavar="N", help="steps of the sampler (the model's default)")
    add("--guidance", type=float, metavar="SCALE", help="guidance scale (the pipeline's default)")
    add("--prompt", default="a red ring", metavar="TEXT", help="what to draw")
    add("--seed", type=whole(0), default=0, metavar="N", help="seed (0)")
    add("--gpus", type=whole(1), default=1, metavar="N", help="GPUs that share one generation (1)")
    add("--serve", action="store_true", help="a server instead of one generation, where the engine has both")
    add("--weights", metavar="PATH", help="transformer weights that were quantized for the engine")
    add(
        "--also",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the engine has besides",
    )
    add("--out", type=Path, metavar="FILE", help="write it there, too")
    add("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.out is not None and not args.out.parent.is_dir():
        raise InvalidOptionError(f"--out: there is no folder {args.out.parent}")
    also = dict(map(_pair, args.also))
    model = resolve(Path(args.model) if Path(args.model).is_dir() else args.model)
    asked = _request(args, model)
    hush_libraries()
    from diffaccel import plan

    from .plan import _load

    decided = plan(_load(args.model), args.preset, hardware=args.hardware, level=args.level)
    made = export(decided, args.engine, asked, also)
    if args.out is not None:
        args.out.write_text(f"{made}\n", encoding="utf-8")
        print(f"diffaccel: wrote {args.out}", file=sys.stderr)
    print(made.to_json() if args.json else made)
    if not args.json and extras_of(args.engine):
        known = "; ".join(f"{name}: {what}" for name, what in extras_of(args.engine).items() if name not in also)
        print(f"diffaccel: --also takes {known}", file=sys.stderr)
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise InvalidOptionError(f"--also must be NAME=VALUE, got {text!r}")
    return name, value


def _request(args: argparse.Namespace, model: Model) -> Request:
    width, height, frames = (*(args.size or (None, None)), None)[:3]
    found = request_of(model, height, width, frames, args.steps, args.guidance, None)
    config = model.config
    return Request(
        model=str(Path(args.model).resolve()) if Path(args.model).is_dir() else model.repository,
        prompt=args.prompt,
        height=found.height,
        width=found.width,
        frames=found.frames,
        steps=found.steps,
        guidance=args.guidance,
        branches=found.branches,
        heads=int(config.get("num_attention_heads") or config.get("n_heads") or 0),
        seed=args.seed,
        gpus=args.gpus,
        serve=args.serve,
        weights=args.weights,
    )
