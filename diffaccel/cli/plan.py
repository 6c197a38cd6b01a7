"""`diffaccel plan`: what a preset would switch on for a pipeline, and why; nothing is run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import hush_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("preset", nargs="?", default="auto", metavar="PRESET", help="preset name or TOML file (auto)")
    add("--model", type=Path, metavar="FOLDER", help="a diffusers pipeline on this machine (the bundled testbed)")
    add("--hardware", metavar="NAME", help="plan for this machine, e.g. 4090 or cpu (the one here)")
    add("--level", metavar="NAME", help="careful, balanced or fast (the preset's, else balanced)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--toml", action="store_true", help="print TOML, to edit and to give to accelerate()")


def run(args: argparse.Namespace) -> int:
    hush_libraries()
    from diffaccel import plan, testbed

    pipe = testbed.load("image") if args.model is None else _load(args.model)
    decided = plan(pipe, args.preset, hardware=args.hardware, level=args.level)
    if args.json:
        print(json.dumps(decided.to_dict(), indent=2, allow_nan=False))
    else:
        print(decided.to_toml().rstrip() if args.toml else decided)
    return 0


def _load(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(f"no diffusers pipeline in {folder} (no model_index.json there)")
    return DiffusionPipeline.from_pretrained(str(folder), local_files_only=True, dtype=_saved_dtype(folder))


def _saved_dtype(folder: Path) -> Any:
    """The dtype of the denoiser's weights in their files; None where there are none of a kind that says so."""
    import torch
    from safetensors import safe_open

    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for path in sorted((*folder.glob("transformer/*.safetensors"), *folder.glob("unet/*.safetensors"))):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                return names.get(file.get_slice(key).get_dtype())
    return None
