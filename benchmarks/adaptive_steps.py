"""How many steps each level of the adaptive cache computes, by world and by the steps of the loop.

    python benchmarks/adaptive_steps.py [--worlds image,video,scenes] [--steps 14,20,28,40,50] [--prompts 4]

Counts alone: nothing is timed and no picture compared. One row per world, level and number of steps, at shift 3,
each prompt by itself; rows are written below benchmarks/results as they come and are not run again. What the ledger
expects of the adaptive cache (diffaccel/ledger/exchange/adaptive.py) rests on these rows;
tests/ledger/test_adaptive_steps.py holds it to them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cache_runs import World, world

from diffaccel import accelerate, testbed
from diffaccel.caching.dial import ADAPTIVE

RESULTS = Path(__file__).parent / "results" / "adaptive_steps.json"
SHIFT = 3.0


def computed(place: World, level: str, steps: int) -> float:
    """Mean computed steps of a loop over the prompts."""
    pipe = testbed.with_shift(place.load(), SHIFT)
    accelerate(pipe, None, strict=True, level=level, cache="adaptive")
    counts = []
    for seed, prompt in enumerate(place.prompts):
        call = testbed.call_kwargs(place.kind) | {"num_inference_steps": steps, "output_type": "latent"}
        pipe(prompt, generator=_noise(seed), **call)
        done = [row for row in pipe.acceleration.report.steps if row.computed]
        counts.append(len({row.index for row in done}))
    return sum(counts) / len(counts)


def _noise(seed: int) -> object:
    """Noise by prompt."""
    import torch

    return torch.Generator().manual_seed(1000 + seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", default="image,video,scenes")
    parser.add_argument("--steps", default="14,20,28,40,50")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else {}
    for kind in args.worlds.split(","):
        place = world(kind, args.prompts, dtype="float32")
        for steps in map(int, args.steps.split(",")):
            for level in ADAPTIVE:
                key = f"{kind}/{steps}/{level}"
                if key not in rows:
                    rows[key] = {"prompts": args.prompts, "computed": round(computed(place, level, steps), 3)}
                    print(key, rows[key], flush=True)
                    data = {"about": {"script": "benchmarks/adaptive_steps.py", "shift": SHIFT}, "rows": rows}
                    args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
