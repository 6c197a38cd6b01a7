"""Layerwise offload from disk to memory: time against max(compute, read), bytes resident, caches, and diffusers' own.

A FLUX transformer with random weights (12 single blocks of 35 MB in float32) in the testbed's pipeline, at a size at
which reading takes about as long as computing, and at one at which computing takes longer. In every round, in turn:
all weights in memory; the bare read of what one pass moves (preadv into one buffer); diffaccel; diffaccel with a
schedule that reuses every second step; diffusers' group offload to disk, block by block. Seconds are those from the
end of the first step to the end of the last one, per step; medians over the rounds. Before each step and each bare
read the files are dropped from the page cache (posix_fadvise DONTNEED after fsync), so that each pass reads from the
device; the host of a virtual machine may still hold them. Prints one JSON document and writes results/offload.json.

    python benchmarks/offload.py [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading

from diffaccel import accelerate, restore, testbed

SIZES = {"36 tokens": 16, "176 tokens": 96}  # pixels
BLOCKS, STEPS = 12, 6
ITEM = "offload.layerwise"
SCHEDULE = {"cache": "schedule", "cache_steps": "10" * (STEPS // 2), "cache_min_steps": 0, "cache_last_steps": 0}


def build() -> tuple[Any, dict[str, Any]]:
    """The testbed's pipeline around a wider transformer, and the arguments of a call."""
    pipe = testbed.load("image")
    config = {k: v for k, v in pipe.transformer.config.items() if not k.startswith("_")}
    config |= {"num_layers": 0, "num_single_layers": BLOCKS, "attention_head_dim": 64, "num_attention_heads": 12}
    torch.manual_seed(0)
    pipe.transformer = FluxTransformer2DModel(**config | {"axes_dims_rope": (16, 24, 24)}).eval()
    pipe.set_progress_bar_config(disable=True)
    call = dict(testbed.call_kwargs("image")) | {"prompt": testbed.prompts("test", 1), "num_inference_steps": STEPS}
    return pipe, call | {"output_type": "latent"}


def drop(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for file in folder.glob("**/*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def per_step(pipe: Any, call: dict[str, Any], folder: Path) -> tuple[float, torch.Tensor]:
    """(seconds per step from the first step's end on, latents)."""
    steps: list[float] = []
    begun = 0.0

    def mark(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        nonlocal begun
        steps.append(time.perf_counter() - begun)
        drop(folder)  # not counted
        begun = time.perf_counter()
        return {}

    drop(folder)
    generator = torch.Generator().manual_seed(0)
    latents = pipe(**call, generator=generator, callback_on_step_end=mark).images
    return sum(steps[1:]) / len(steps[1:]), latents


def bare_read(folder: Path) -> float:
    """Seconds to read all files of a folder into one buffer."""
    files = sorted(folder.glob("**/*.safetensors"))
    buffer = memoryview(bytearray(max(file.stat().st_size for file in files)))
    buffer[::4096] = bytes(len(buffer[::4096]))  # the pages are there
    drop(folder)
    started = time.perf_counter()
    for file in files:
        fd, at, size = os.open(file, os.O_RDONLY), 0, file.stat().st_size
        while at < size:
            at += os.preadv(fd, [buffer[at:size]], at)
        os.close(fd)
    return time.perf_counter() - started


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    rows = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("RssAnon"))


def one_round(pipe: Any, call: dict[str, Any], peer: Any) -> dict[str, Any]:
    """Every way of running, once."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found["resident_s"], plain = per_step(pipe, call, folder)
        full_bytes = anonymous_bytes()
        options = {"offload": "layerwise", "offload_store": "disk", "offload_folder": name}
        for key, more in (("offload", {}), ("half_hits", SCHEDULE)):
            accelerate(pipe, preset=None, strict=True, **options, **more)
            if key == "offload":
                found["read_s"] = bare_read(folder)
                found["freed_bytes"] = full_bytes - anonymous_bytes()
            found[f"{key}_s"], latents = per_step(pipe, call, folder)
            found[f"{key}_stats"] = dict(pipe.acceleration.report.stats[ITEM])
            found["predicted"] = dict(pipe.acceleration.plan.item(ITEM).predicted)
            found[f"{key}_equal"] = bool(torch.equal(latents, plain))
            restore(pipe)
    found["diffusers_s"], latents = per_step(peer[0], call, peer[1])
    found["diffusers_equal"] = bool(torch.equal(latents, plain))
    return found


def diffusers_peer(folder: Path) -> Any:
    """The same model under diffusers' group offload to disk."""
    pipe, _ = build()
    cpu = torch.device("cpu")
    apply_group_offloading(
        pipe.transformer,
        cpu,
        cpu,
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(folder),
    )
    return pipe, folder


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and what they come to."""
    mid: Callable[[str], float] = lambda key: median(found[key] for found in rounds)  # noqa: E731
    last = rounds[-1]
    peak, predicted = last["offload_stats"]["live_bytes_peak"], last["predicted"]["resident_bytes"]
    bound = max(mid("resident_s"), mid("read_s"))
    return {
        "seconds_per_step": {
            "compute (all weights in memory)": mid("resident_s"),
            "read (bare)": mid("read_s"),
            "offload": mid("offload_s"),
            "offload, every second step reused": mid("half_hits_s"),
            "diffusers group offload to disk": mid("diffusers_s"),
        },
        "offload / max(compute, read)": mid("offload_s") / bound,
        "offload / max, each round": [f["offload_s"] / max(f["resident_s"], f["read_s"]) for f in rounds],
        "diffusers / max(compute, read)": mid("diffusers_s") / bound,
        "bytes resident": {"measured": peak, "predicted": predicted, "ratio": peak / predicted},
        "bytes of anonymous memory freed": last["freed_bytes"],
        "bytes read": {
            "plain": last["offload_stats"]["bytes_moved"],
            "every second step reused": last["half_hits_stats"]["bytes_moved"],
            "ratio": last["half_hits_stats"]["bytes_moved"] / last["offload_stats"]["bytes_moved"],
        },
        "seconds waited per step": last["offload_stats"]["wait_s"] / STEPS,
        "disk GB/s while computing": last["offload_stats"].get("read_gb_s"),
        "bit-equal": {"offload": last["offload_equal"], "diffusers": last["diffusers_equal"]},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "offload.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one core computes, one reads
    pipe, call = build()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = diffusers_peer(Path(folder))
        for name, pixels in SIZES.items():
            sized = call | {"height": pixels, "width": pixels}
            if not rows:
                one_round(pipe, sized, peer)  # warms up
            rows[name] = summary([one_round(pipe, sized, peer) for _ in range(args.rounds)])
    size = sum(p.numel() * 4 for p in pipe.transformer.single_transformer_blocks[0].parameters())
    document = {
        "model": f"FLUX, {BLOCKS} single blocks of {size / 1e6:.1f} MB, float32",
        "settings": {"resident_layers": 2, "prefetch": 1, "steps": STEPS, "rounds": args.rounds, "threads": 1},
        "page cache": "dropped before every step (posix_fadvise DONTNEED); the host of a virtual machine may hold it",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "rows": rows,
    }
    text = json.dumps(document, indent=1)
    print(text)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
