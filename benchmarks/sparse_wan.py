"""A step of a random-weight Wan with sparse attention against the same step with dense attention, end to end.

Six blocks, at 8192 tokens (8 frames of 32 x 32) unless told otherwise. Weights are random, so only time is said, not
quality. Settings take turns; each figure is the median over the runs. Prints one JSON document and writes it.

    python benchmarks/sparse_wan.py
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

from diffaccel import accelerate, testbed

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "sta 0.19": {"attention": "sta", "attention_density": 0.19},
    "svg 0.25": {"attention": "svg", "attention_density": 0.25},
    "radial 0.5": {"attention": "radial", "attention_density": 0.5},
    "svg2 0.25": {"attention": "svg2", "attention_density": 0.25},
    "topk 0.25": {"attention": "topk", "attention_density": 0.25},
}


def build(heads: int, blocks: int) -> Any:
    """The trained video testbed with another, larger and untrained denoiser of head_dim 128."""
    pipe = testbed.load("video")
    old = pipe.transformer.config
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=128, in_channels=old.in_channels, out_channels=old.out_channels,
        text_dim=old.text_dim, freq_dim=256, ffn_dim=heads * 128 * 4, num_layers=blocks, rope_max_seq_len=1024,
    ).eval()  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler()
    return WanPipeline(pipe.tokenizer, pipe.text_encoder, pipe.vae, scheduler, transformer)


def one(pipe: Any, options: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of one denoiser call behind the dense step, and what the attention did."""
    accelerate(pipe, None, **({**options, "attention_dense_steps": 1, "attention_dense_layers": 0} if options else {}))
    pipe(**call, generator=torch.Generator().manual_seed(0))
    report = pipe.acceleration.report
    seconds = [step.seconds for step in report.steps[1:]]
    stats = report.stats.get(f"attention.{options.get('attention')}", {})
    return {"seconds": min(seconds), "density": stats.get("density"), "calls": stats.get("calls")}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=8, help="latent frames")
    parser.add_argument("--side", type=int, default=64, help="latent rows and columns (two to a token)")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sparse_wan.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipe = build(args.heads, args.blocks)
    pipe.set_progress_bar_config(disable=True)
    ratio, stride = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
    call = {
        "prompt": "a red ring", "height": args.side * ratio, "width": args.side * ratio, "guidance_scale": 1.0,
        "num_frames": (args.frames - 1) * stride + 1, "num_inference_steps": 2, "output_type": "latent",
    }  # fmt: skip
    names = [name for name in SETTINGS if args.only is None or name in ("dense", *args.only)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            start = time.perf_counter()
            found[name].append(one(pipe, SETTINGS[name], call))
            print(f"{name}: {found[name][-1]} ({time.perf_counter() - start:.0f} s in all)", flush=True)
    dense = median(run["seconds"] for run in found["dense"])
    rows = {
        name: {
            "seconds_per_step": median(run["seconds"] for run in runs),
            "times_faster": dense / median(run["seconds"] for run in runs),
            "density": runs[-1]["density"],
            "calls": runs[-1]["calls"],
        }
        for name, runs in found.items()
    }
    result = {
        "tokens": args.frames * (args.side // 2) ** 2,
        "model": f"Wan, {args.blocks} blocks, {args.heads} heads of 128, random weights, float32, 1 thread",
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
