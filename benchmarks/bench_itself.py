"""Is `diffaccel bench` itself to be trusted? A plan against itself, and how often its intervals hold.

    python benchmarks/bench_itself.py [--rounds 10] [--steps 28] [--out benchmarks/results/bench_itself.json]

`ratios`: the plain pipeline, and a cache, against themselves under another name, in turn (A B B A): a speed that ought
to be 1, with its 90 % interval; the aim is within 3 %. By the wall clock, and by the CPU seconds of this process. The
load stands beside it: other jobs are in the wall clock, and through the caches of the processor in both.
`coverage`: of 100 resamplings of n PSNRs out of a measured population (the benchmarks' own rows), in how many the 90 %
interval holds the population's mean; the aim is 85 to 95.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from diffaccel import testbed
from diffaccel.bench import bench
from diffaccel.bench.turns import ratios
from diffaccel.quality.bootstrap import bootstrap

RESULTS = Path(__file__).parent / "results"
PLANS: dict[str, dict[str, Any]] = {
    "plain": {"plain": None, "again": None},
    "first_block": {
        "plain": None,
        "ours": {"cache": "first_block", "cache_threshold": 0.1},
        "again": {"cache": "first_block", "cache_threshold": 0.1},
    },
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LEVEL, AIM, COVER = 0.9, 0.03, (85, 95)


def itself(kind: str, name: str, rounds: int, steps: int, clock: str) -> dict[str, Any]:
    """The last two contenders of PLANS, which are one and the same, against each other."""
    pipe = testbed.load(kind)
    pipe.set_progress_bar_config(disable=True)
    call = {**testbed.call_kwargs(kind), "num_inference_steps": steps}
    before = os.getloadavg()[0]
    found = bench(
        pipe,
        PLANS[name],
        testbed.prompts(n=2, kind=kind),
        rounds=rounds,
        floor=0,
        level=LEVEL,
        clock=CLOCKS[clock],
        **call,
    )
    one, two = list(PLANS[name])[-2:]
    laps = [found.contender(who)["latency_s"]["each"] for who in (one, two)]
    each = ratios(*laps)
    interval = bootstrap(each, LEVEL, statistic=np.median)
    row = {
        "plan": name,
        "clock": clock,
        "ratio": round(interval.mean, 4),
        "interval": interval.to_list(4),
        "each": [round(value, 4) for value in each],
        "without_turns": round(median(pair[0] for pair in laps[0]) / median(pair[0] for pair in laps[1]), 4),
        "met": bool(abs(interval.mean - 1) <= AIM),
        "rounds": rounds,
        "steps": steps,
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
    }
    print(json.dumps(row), flush=True)
    return row


def population() -> np.ndarray:
    """All PSNRs of single prompts in a committed result."""
    found: list[float] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(value.get("psnr_each_db", ()))
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    walk(json.loads((RESULTS / "cache_quality.json").read_text(encoding="utf-8")))
    return np.array(found)


def coverage(prompts: int, times: int = 100, seed: int = 0) -> dict[str, Any]:
    """How many of so many resamplings' intervals hold the mean of the population they come from."""
    values, rng = population(), np.random.default_rng(seed)
    held = 0
    for number in range(times):
        interval = bootstrap(rng.choice(values, prompts).tolist(), LEVEL, seed=number)
        held += bool(interval.low <= values.mean() <= interval.high)
    return {"prompts": prompts, "held": held, "of": times, "met": COVER[0] <= held <= COVER[1]}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="image")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--clocks", nargs="+", choices=CLOCKS, default=list(CLOCKS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_itself.json")
    args = parser.parse_args()
    result = {
        "ratios": [
            itself(args.kind, plan, args.rounds, args.steps, clock) for clock in args.clocks for plan in args.plans
        ],
        "coverage": [coverage(prompts) for prompts in (8, 16, 32)],
        "population": len(population()),
    }
    print(json.dumps(result["coverage"]))
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
