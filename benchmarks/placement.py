"""Stage offload to disk: predicted against measured memory of the host, and what the kept text encodings save.

    python benchmarks/placement.py

One process per setting runs a FLUX pipeline of about 75 million random weights: plain, in stages, and in stages with
one encoder at a time. For each: predicted peak of weights, measured peak of the resident set above what it was before
the pipeline was built, weight bytes in memory when components compute, seconds of the first run and of the second
(whose prompt is known), bytes brought in. Prints one JSON document and writes benchmarks/results/placement.json; exits
1 where a prediction is off by more than 15 % or a picture differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stage": {"offload": "stage"},
    "stage, in turn": {"offload": "stage", "offload_in_turn": True},
    "stage, nothing kept": {"offload": "stage", "offload_text_cache_bytes": 0},
}
LIMIT = 0.15
STEPS = 2


def one(name: str) -> dict[str, Any]:
    """A row, measured in this process."""
    import torch

    from diffaccel import accelerate
    from diffaccel.models.registry import lookup
    from diffaccel.offload.components import component_sizes
    from diffaccel.offload.host_memory import trim_heap
    from diffaccel.offload.stage.peak import Placement, predict_peak
    from tests import tiny
    from tests.offload.placement_worker import MIB, bytes_in_memory, medium, reset_peak, status

    options = dict(SETTINGS[name])
    if options:
        options.setdefault("offload_text_cache_bytes", MIB)
    tiny.run(tiny.build("flux"), "flux", num_inference_steps=1)  # libraries load what they load late
    before = status("VmRSS")
    torch.manual_seed(0)
    pipe = medium()
    placement = Placement("disk" if options else "device", options.get("offload_in_turn", False))
    kept = options.get("offload_text_cache_bytes", 0)
    predicted = predict_peak(component_sizes(pipe, lookup(pipe)), placement, "cpu", kept_bytes=kept)
    started = time.perf_counter()
    if options:
        accelerate(pipe, None, strict=True, **options)
    row: dict[str, Any] = {"attach_s": round(time.perf_counter() - started, 3) if options else 0.0}
    live: list[int] = []
    for component in ("text_encoder_2", "transformer", "vae"):
        inner = [m for m in getattr(pipe, component).modules() if next(m.parameters(recurse=False), None) is not None]
        inner[-1].register_forward_hook(lambda *_: live.append(bytes_in_memory(pipe)))
    trim_heap()
    reset_peak()
    for number in ("first", "second"):
        started = time.perf_counter()
        pictures = tiny.run(pipe, "flux", num_inference_steps=STEPS)
        row[f"{number}_run_s"] = round(time.perf_counter() - started, 3)
        stats = pipe.acceleration.report.stats["offload.stage"] if options else {}
        row[f"{number}_run"] = {k: v for k, v in stats.items() if v}
    row |= {
        "predicted_bytes": predicted.host_bytes,
        "predicted_by_moment": dict(predicted.moments),
        "rss_bytes": status("VmHWM") - before,
        "live_weight_bytes": max(live),
        "sha256": hashlib.sha256(pictures.numpy().tobytes()).hexdigest(),
    }
    row["off_by"] = round(predicted.host_bytes / row["rss_bytes"] - 1, 4)
    return row


def main() -> int:
    """All rows; 1 where a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--one", choices=SETTINGS, help="measure one setting in this process")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "placement.json")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(one(args.one)))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    for name in SETTINGS:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
    missed = [name for name, row in rows.items() if abs(row["off_by"]) > LIMIT]
    differs = [name for name, row in rows.items() if row["sha256"] != rows["plain"]["sha256"]]
    document = {"steps": STEPS, "limit": LIMIT, "missed": missed, "differs": differs, "rows": rows}
    text = json.dumps(document, indent=1)
    print(text)
    args.out.write_text(text + "\n", encoding="utf-8")
    return int(bool(missed or differs))


if __name__ == "__main__":
    sys.exit(main())
