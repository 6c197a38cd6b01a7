"""Shared by the scripts of this folder: one pipeline, plain and with each of several settings, in turn.

For every setting: wall seconds (median of interleaved rounds, the device synchronised), peak memory of the device,
share of reused calls, PSNR and SSIM to the plain pictures of the same noise, the plan and the notes of the run.
Prints one JSON document and writes it to --out. None of these scripts has been run on a GPU by us.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from diffaccel import accelerate, quality, restore, testbed

Settings = Mapping[str, Mapping[str, Any]]


def arguments(description: str) -> argparse.Namespace:
    """The options that all scripts take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="folder or hub name of a diffusers pipeline; default: the bundled testbed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--prompt", action="append", help="may be repeated; default: prompts of the testbed")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--guidance-scale", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of settings")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """(pipeline on the device, arguments of one call)."""
    dtype = getattr(torch, args.dtype)
    if args.model is None:
        pipe, call = testbed.load("image", torch_dtype=dtype), dict(testbed.call_kwargs("image"))
        call["prompt"] = args.prompt or testbed.prompts("test", 4)
    else:
        from diffusers import DiffusionPipeline

        pipe = DiffusionPipeline.from_pretrained(args.model, torch_dtype=dtype)
        call = {"prompt": args.prompt or ["a red ring on a navy background"]}
    pipe.to(args.device)
    pipe.set_progress_bar_config(disable=True)
    given = {
        "height": args.height,
        "width": args.width,
        "num_frames": args.frames,
        "guidance_scale": args.guidance_scale,
    }
    call |= {name: value for name, value in given.items() if value is not None}
    return pipe, call | {"num_inference_steps": args.steps, "output_type": "np"}


def _once(pipe: Any, call: Mapping[str, Any], device: str) -> tuple[Any, float, int]:
    generator = [torch.Generator("cpu").manual_seed(i) for i in range(len(call["prompt"]))]
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = pipe(**call, generator=generator)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return result, seconds, torch.cuda.max_memory_allocated() if cuda else 0


def compare(args: argparse.Namespace, settings: Settings) -> None:
    """Measure every setting (overrides of `accelerate`), plain first, and print the document."""
    pipe, call = load(args)
    names = ["plain", *(name for name in settings if args.only is None or name in args.only)]
    rows: dict[str, dict[str, Any]] = {name: {"seconds_all": []} for name in names}
    plain: Any = None
    for number in range(args.rounds + 1):  # the first round warms up
        for name in names:
            row = rows[name]
            if name != "plain":
                accelerate(pipe, preset=None, **settings[name])
                items = [item for item in pipe.acceleration.plan.items if item.status != "enabled"]
                row["left_out"] = {item.name: item.reason for item in items}
            result, seconds, peak = _once(pipe, call, args.device)
            pictures = result.images if hasattr(result, "images") else result.frames
            if name == "plain":
                plain = pictures
            else:
                report = pipe.acceleration.report
                row |= {"hit_rate": report.hit_rate, "notes": report.notes, **quality.compare(plain, pictures)}
            restore(pipe)
            row["peak_bytes"] = peak
            if number:
                row["seconds_all"].append(seconds)
    for row in rows.values():
        row["seconds"] = median(row["seconds_all"])
        row["speed"] = rows["plain"]["seconds_all"] and median(rows["plain"]["seconds_all"]) / row["seconds"]
    device = torch.cuda.get_device_name() if torch.device(args.device).type == "cuda" else platform.machine()
    document = {
        "model": args.model or "testbed",
        "device": device,
        "dtype": args.dtype,
        "steps": args.steps,
        "rows": rows,
    }
    text = json.dumps(document, indent=1, default=str)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
