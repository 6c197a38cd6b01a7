"""`diffaccel quantize`: a pipeline's denoisers into a 4-bit checkpoint, calibrated on a few prompts."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import hush_libraries
from .given import load_pipeline, size, whole

SCHEMES = {"svdquant-int4": "int4", "svdquant-nvfp4": "nvfp4"}
LAYOUTS = ("best", "nunchaku", "lite")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scheme", required=True, choices=SCHEMES, help="4-bit integers, or NVFP4 (for Blackwell)")
    add("--model", required=True, metavar="PATH", help="a diffusers pipeline on this machine, or testbed:image|video")
    add("--calib", type=Path, metavar="FILE", help="prompts to calibrate on, one a line (none: nothing is smoothed)")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for svdquant.safetensors")
    add("--rank", type=whole(0), default=32, metavar="N", help="rank of the 16-bit branch (32)")
    add("--alpha", type=_alpha, default="grid", metavar="A", help="strength of the smoothing, 0..1, or grid (grid)")
    add("--refine", type=whole(0), default=0, metavar="N", help="rounds of fitting the branch again (0)")
    add("--layout", choices=LAYOUTS, default="best", help="also write the file nunchaku, or diffusers' Lite, loads")
    add("--steps", type=whole(1), default=4, metavar="N", help="denoising steps of each calibration run (4)")
    add("--size", type=size, metavar="WxH[xF]", help="size of the calibration runs (the pipeline's own)")
    add("--seed", type=whole(0), default=0, metavar="N", help="seed of the calibration runs (0)")
    add("--max-bytes", type=_bytes, default=512 * 2**20, metavar="N", help="memory for calibration, e.g. 512M (512M)")
    add("--keep", action="append", default=[], metavar="REGEX", help="layers that stay in 16 bits (may be repeated)")
    add("--restart", action="store_true", help="do not go on with an unfinished run in DIR")
    add("--json", action="store_true", help="print one JSON document")
    add("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    hush_libraries()
    from ..models.registry import lookup
    from ..quantization.svdquant.ptq import quantize_pipeline

    settings = _settings(args)
    prompts = _prompts(args.calib)
    pipe, call = load_pipeline(args.model, args.size)
    _check_layout(args.layout, pipe, settings)
    with _progress(args.quiet) as progress:
        if not prompts:
            print("diffaccel: no --calib: nothing is known of the activations, nothing is smoothed", file=sys.stderr)
        try:
            report = quantize_pipeline(
                pipe, lookup(pipe), args.out, settings, prompts, call, progress, restart=args.restart
            )
        except KeyboardInterrupt:
            print(f"diffaccel: what is done lies in {args.out}; the same command goes on from there", file=sys.stderr)
            raise
    report["written"] = [report["path"], *_export(args, pipe)]
    if args.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        _say(report)
    return 0


def _settings(args: argparse.Namespace) -> Any:
    from ..quantization.policy import Policy
    from ..quantization.svdquant.math import ALPHAS, Recipe
    from ..quantization.svdquant.ptq import Settings

    alpha = ALPHAS if args.alpha == "grid" else (args.alpha,)
    recipe = Recipe(SCHEMES[args.scheme], args.rank, alpha, args.refine)
    return Settings(recipe, Policy(keep=tuple(args.keep)), args.layout, args.steps, args.seed, args.max_bytes)


def _prompts(path: Path | None) -> list[str]:
    from ..errors import InvalidOptionError

    if path is None:
        return []
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise InvalidOptionError(f"--calib {path}: no prompt in it (one a line)")
    return found


def _check_layout(layout: str, pipe: Any, settings: Any) -> None:
    """Refuse before the work what could not be written after it."""
    from ..errors import UnsupportedModelError
    from ..models.registry import lookup
    from ..quantization.svdquant.nunchaku_files import lite_refusal, native_refusal
    from ..quantization.svdquant.ptq import works

    for work in works(pipe, lookup(pipe), settings):
        names = list(work.selection.quantized)
        if layout == "nunchaku":
            why = native_refusal(work.module, lookup(pipe), names)
        else:
            why = lite_refusal(work.module, names) if layout == "lite" else None
        if why is not None:
            raise UnsupportedModelError(f"--layout {layout}: {why}")


def _export(args: argparse.Namespace, pipe: Any) -> list[str]:
    """The files in other layouts that were asked for."""
    if args.layout == "best":
        return []
    from ..models.registry import lookup
    from ..quantization.svdquant.checkpoint import Checkpoint
    from ..quantization.svdquant.nunchaku_files import export_lite, export_native

    checkpoint, spec, written = Checkpoint(args.out), lookup(pipe), []
    for component in checkpoint.header.layers:
        layers = dict(checkpoint.layers(component))
        if args.layout == "nunchaku":
            path = args.out / f"nunchaku-{component}.safetensors"
            export_native(getattr(pipe, component), spec, layers, path)
        else:
            path = args.out / "lite" / component
            export_lite(getattr(pipe, component), layers, path)
        written.append(str(path))
    return written


def _say(report: dict[str, Any]) -> None:
    smaller = report["bytes_before"] / max(report["bytes"], 1)
    print(
        f"{report['layers']} layers in {report['bytes'] / 2**20:.1f} MiB, {smaller:.1f}x smaller than their weights "
        f"were, in {report['seconds']:.1f} s"
    )
    for row in report["worst"]:
        print(f"  {row['layer']}: relative error {row['relative_error']:.4f}")
    for path in report["written"]:
        print(path)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar per stage on stderr."""
    if quiet:
        yield None
        return
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            for other in bars.values():
                other.close()
            bars[stage] = tqdm(total=total, desc=stage, file=sys.stderr, leave=True)
        bars[stage].update(done - bars[stage].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()


def _alpha(text: str) -> float | str:
    if text == "grid":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'grid' nor a number from 0 to 1")
    return value


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes (like 4096, 512M, 2G)")
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]
