"""Python calls of the package's own functions in one pipeline call, by room.

First-block cache, 8-bit attention (the reference in PyTorch) and layerwise offload to disk together, ten steps on the
image testbed, second run; counted by sys.setprofile in the calling thread, frames of generators and comprehensions
included, as the interpreter counts them. "hits" are steps that the cache answered. Works on any version of the
package: PYTHONPATH=TREE python benchmarks/own_calls.py. Prints one JSON document; `--out FILE` writes it as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import diffaccel
from diffaccel import accelerate, restore, testbed

PACKAGE = str(Path(diffaccel.__file__).parent) + "/"
STEPS = 10
THRESHOLDS = (0.2, 1e-9)  # every second step reused, none


def run(pipe: Any, prompts: list[str]) -> None:
    """One call of the pipeline."""
    generator = torch.Generator().manual_seed(0)
    pipe(prompts, num_inference_steps=STEPS, generator=generator, **testbed.call_kwargs("image"))


def count(threshold: float) -> dict[str, Any]:
    """Calls by room at one threshold of the cache."""
    pipe, prompts = testbed.load("image"), testbed.prompts("test", 1)
    pipe.set_progress_bar_config(disable=True)
    levers = {"cache": "first_block", "cache_threshold": threshold, "attention": "sage", "offload": "layerwise"}
    accelerate(pipe, None, strict=True, attention_variant="reference", offload_store="disk", **levers)
    run(pipe, prompts)
    rooms: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            rooms[frame.f_code.co_filename.removeprefix(PACKAGE).split("/")[0]] += 1

    sys.setprofile(seen)
    try:
        run(pipe, prompts)
    finally:
        sys.setprofile(None)
    hits = sum(not step.computed for step in pipe.acceleration.report.steps)
    restore(pipe)
    return {"threshold": threshold, "hits": hits, "calls": rooms.total(), "by room": dict(rooms.most_common())}


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    document = {"steps": STEPS, "python": ".".join(map(str, sys.version_info[:2]))}
    text = json.dumps(document | {"rows": [count(threshold) for threshold in THRESHOLDS]}, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
