"""Layerwise offload from disk to memory: time against max(compute, read), bytes resident, caches, and diffusers' own.

A FLUX transformer with random weights (12 single blocks of 35 MB in float32) in the testbed's pipeline, at a size at
which reading takes about as long as computing, and at one at which computing takes longer. In every round, in turn:
all weights in memory; the bare read of what one pass moves (preadv into one buffer); diffaccel; the bare read again;
diffaccel with a schedule that reuses every second step; diffusers' group offload to disk, block by block; all weights
in memory again. Every second round goes the other way round.

Seconds are those from the end of the first step to the end of the last one, per step, with all that happens in between
in every row: what is not counted could be used for reading. After each step and before each bare read the files are
dropped from the page cache (posix_fadvise DONTNEED), so that each pass reads from the device; the host of a virtual
machine may still hold them, and does so more or less from one minute to the next.

The lower bound of a round is max(compute, read), where both are the *faster* of the two measurements that stand around
the offload of that round. It is the bound of one thread that computes and one that reads, each alone on a core.
Prints one JSON document and writes results/offload.json.

    python benchmarks/offload.py [--rounds 5] [--out FILE]
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
    """(seconds per step from the first step's end to the last one's, latents)."""
    ends: list[float] = []

    def mark(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        ends.append(time.perf_counter())
        drop(folder)  # counted: a reader goes on meanwhile
        return {}

    drop(folder)
    generator = torch.Generator().manual_seed(0)
    latents = pipe(**call, generator=generator, callback_on_step_end=mark).images
    return (ends[-1] - ends[0]) / (len(ends) - 1), latents


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


def one_round(pipe: Any, call: dict[str, Any], peer: Any, backwards: bool) -> dict[str, Any]:
    """Every way of running, once; what bounds the offload stands around it, twice."""
    found: dict[str, Any] = {"resident": [], "read": []}

    def resident() -> None:
        seconds, found["latents"] = per_step(pipe, call, peer[1])
        found["resident"].append(seconds)
        found.setdefault("full_bytes", anonymous_bytes())

    def offload() -> None:
        with tempfile.TemporaryDirectory() as name:
            options = {"offload": "layerwise", "offload_store": "disk", "offload_folder": name}
            accelerate(pipe, preset=None, strict=True, **options)
            found["freed_bytes"] = found.get("full_bytes", anonymous_bytes()) - anonymous_bytes()
            found["read"].append(bare_read(Path(name)))
            found["offload_s"], found["offload_latents"] = per_step(pipe, call, Path(name))
            found["read"].append(bare_read(Path(name)))
            found["offload_stats"] = dict(pipe.acceleration.report.stats[ITEM])
            found["predicted"] = dict(pipe.acceleration.plan.item(ITEM).predicted)
            accelerate(pipe, preset=None, strict=True, **options, **SCHEDULE)
            found["half_hits_s"], _ = per_step(pipe, call, Path(name))
            found["half_hits_stats"] = dict(pipe.acceleration.report.stats[ITEM])
            restore(pipe)

    def diffusers() -> None:
        found["diffusers_s"], found["diffusers_latents"] = per_step(peer[0], call, peer[1])

    ways = [resident, offload, resident, diffusers]
    for way in reversed(ways) if backwards else ways:
        way()
    plain = found.pop("latents")
    for name in ("offload", "diffusers"):
        found[f"{name}_equal"] = bool(torch.equal(found.pop(f"{name}_latents"), plain))
    return found | {"resident_s": min(found["resident"]), "read_s": min(found["read"])}


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
    ratios = [f["offload_s"] / max(f["resident_s"], f["read_s"]) for f in rounds]
    peers = [f["diffusers_s"] / max(f["resident_s"], f["read_s"]) for f in rounds]
    return {
        "seconds_per_step": {
            "compute (all weights in memory)": mid("resident_s"),
            "read (bare)": mid("read_s"),
            "offload": mid("offload_s"),
            "offload, every second step reused": mid("half_hits_s"),
            "diffusers group offload to disk": mid("diffusers_s"),
        },
        "offload / max(compute, read), median of the rounds": median(ratios),
        "offload / max, each round": ratios,
        "offload / (compute + read), median": median(f["offload_s"] / (f["resident_s"] + f["read_s"]) for f in rounds),
        "diffusers / max(compute, read), median": median(peers),
        "compute, each round": [f["resident"] for f in rounds],
        "bare read, before and after, each round": [f["read"] for f in rounds],
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
    parser.add_argument("--rounds", type=int, default=5)
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
                one_round(pipe, sized, peer, False)  # warms up
            rows[name] = summary([one_round(pipe, sized, peer, bool(i % 2)) for i in range(args.rounds)])
    size = sum(p.numel() * 4 for p in pipe.transformer.single_transformer_blocks[0].parameters())
    document = {
        "model": f"FLUX, {BLOCKS} single blocks of {size / 1e6:.1f} MB, float32",
        "settings": {"resident_layers": 2, "prefetch": 1, "steps": STEPS, "rounds": args.rounds},
        "threads": {"that compute": torch.get_num_threads(), "that read": "1 (diffaccel, bare read); diffusers: none"},
        "page cache": "dropped before every step (posix_fadvise DONTNEED); the host of a virtual machine may hold it",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load average (1, 5, 15 minutes) at the end": os.getloadavg(),
        "rows": rows,
    }
    text = json.dumps(document, indent=1)
    print(text)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
