"""Fidelity against computed forwards and wall clock: our caches, the peers', and simply fewer steps.

    python benchmarks/cache_quality.py             # 28 steps: 32 held-out prompts of the image world, 8 of the video
    python benchmarks/cache_quality.py --full      # 50 steps too
    python benchmarks/cache_quality.py --quick     # 2 prompts, no times: does everything run?
    python benchmarks/cache_quality.py --only searched euler --prompts 8
    python benchmarks/cache_quality.py --kinds image --dtype bfloat16 --rounds 0   # a file of its own

Per setting: full-stack forwards and all work per guidance branch and run (counted at the denoiser's linear layers,
for ours and the peers alike), PSNR and SSIM to the plain run of as many steps and to one of 112, the prompt score,
and the pipeline call's time over the plain one's (interleaved medians). Beside them: plain Euler with fewer steps,
UniPC and DPM++ at equal cost, and the noise floor of the dtype: runs that differ from the plain one in rounding alone.
`comparison` answers who is best at 14 and at 9 of 28 computed steps, with paired bootstrap intervals over the prompts.

Adaptive methods run one prompt at a time, as a user would; those whose steps are fixed run in batches of 8, which
gives the same pictures. PSNR is of float pictures, not of 8-bit ones, and stops at 100 dB. Times are of single
prompts. A reused output is Euler on fewer steps with better velocities, so the plain run of as many steps is what
a cache aims at; the run of 112 steps shows what that is worth. All results are of tiny models: testbed only.

A setting that never left anything out is marked `no_op` (diffusers' SeaCache is one on FLUX, without a word).

Prints one JSON document and writes it to results/cache_quality.json, with the curves beside it as PNG (matplotlib,
in the extra `bench`). Peers that are not installed (`pip install cache-dit==1.5.3`) are named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_baselines import baselines, noise
from cache_calibrate import Context
from cache_compare import CAPS, compare, draw, table, verdicts
from cache_peers import PEERS, REFUSALS, versions
from cache_runs import (
    FULL_SHARE,
    REFERENCE_STEPS,
    STEPS,
    World,
    Yardstick,
    counting,
    fidelity,
    interleaved,
    world,
    yardstick,
)
from cache_settings import settings

from diffaccel.errors import DiffaccelError

PROMPTS = {"image": 32, "video": 8}
TRAIN_PROMPTS = 4  # for peers that calibrate
NOISE_PROMPTS = 8  # bfloat16 is slow on most CPUs
BATCH = 8


@dataclass
class Bench:
    """One testbed at one number of steps."""

    place: World
    steps: int
    rounds: int
    yard: Yardstick
    plain: Any  # a pipeline that stays plain
    references: dict[str, np.ndarray]
    wanted: Callable[[str], bool]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def measure(
        self, head: Mapping[str, Any], pipe: Any, steps: int, adaptive: bool, count: int | None = None
    ) -> None:
        """Run all prompts on a prepared pipeline and add its row."""
        prompts = self.place.prompts[:count]
        with counting(pipe) as work:
            pictures = self.place.generate(pipe, steps, batch=1 if adaptive else BATCH, count=count)
        counts = self.yard.counts(work, len(prompts))
        if head["group"] == "noise":  # compiled layers run no hooks, and nothing is left out here
            counts = {name: float(steps) for name in counts}
        references = {name: pictures_of[: len(prompts)] for name, pictures_of in self.references.items()}
        row = {**head, "status": "ok", "steps": steps, "prompts": len(prompts)}
        row |= {name: round(value, 3) for name, value in counts.items()}
        row |= fidelity(references, pictures, prompts)
        row["no_op"] = head["group"] in ("ours", "peer") and counts["equivalent"] >= steps * FULL_SHARE
        if self.rounds:
            row["time"] = interleaved(
                lambda: self.place.generate(self.plain, self.steps, batch=1, count=1),
                lambda: self.place.generate(pipe, steps, batch=1, count=1),
                self.rounds,
            )
        self.add(row)

    def refuse(self, head: Mapping[str, Any], status: str, reason: object) -> None:
        self.add({**head, "status": status, "reason": str(reason).strip().split("\n")[0]})

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        told = f"{row['computed']:6.2f} {row['plain']['psnr_db']:7.2f} dB" if row["status"] == "ok" else row["reason"]
        told += " (nothing was ever left out)" if row.get("no_op") else ""
        say(f"{self.place.kind} {self.steps} {row['name']:44} {told}")


def bench_ours(bench: Bench, context: Context) -> None:
    for setting in settings():
        if bench.place.kind not in setting.kinds or (setting.steps and bench.steps not in setting.steps):
            continue
        if not bench.wanted(setting.name):
            continue
        head = {"name": setting.name, "group": "ours", "method": setting.method}
        head |= {"options": dict(setting.options), "adaptive": setting.adaptive}
        head |= {"origin": setting.origin} if setting.origin else {}
        pipe = bench.place.load()
        try:
            setting.apply(pipe, context)
        except DiffaccelError as error:
            bench.refuse(head, "refused", error)
            continue
        bench.measure(head, pipe, bench.steps, setting.adaptive)


def bench_peers(bench: Bench, context: Context) -> None:
    installed = versions()
    for peer in PEERS:
        if bench.place.kind not in peer.kinds or (peer.steps and bench.steps not in peer.steps):
            continue
        if not bench.wanted(peer.name):
            continue
        head = {"name": peer.name, "group": "peer", "library": peer.library, "method": f"{peer.library} {peer.method}"}
        head |= {"adaptive": peer.adaptive, "our_schedule": peer.our_schedule}
        if installed[peer.library] == "not installed":
            bench.refuse(head, "not installed", f"pip install {peer.library}")
            continue
        pipe = bench.place.load()
        try:
            peer.enable(pipe, context)
            bench.measure(head, pipe, bench.steps, peer.adaptive)
        except REFUSALS as error:
            bench.refuse(head, "fails", f"{type(error).__name__}: {error}")


def bench_baselines(bench: Bench) -> None:
    caps = CAPS.get(bench.steps, (bench.steps // 2, bench.steps // 3))
    for baseline in baselines(caps):
        if not bench.wanted(baseline.name):
            continue
        head = {"name": baseline.name, "group": "baseline", "method": baseline.solver, "adaptive": False}
        pipe = bench.place.load()
        baseline.apply(pipe, bench.plain.scheduler.sigmas.tolist())
        bench.measure(head, pipe, baseline.steps, False)


def bench_noise(bench: Bench, limit_s: float) -> None:
    for run in noise(bench.place.dtype):
        if not bench.wanted(run.name):
            continue
        head = {"name": run.name, "group": "noise", "method": run.name, "adaptive": run.singly}
        began = time.perf_counter()
        try:
            pipe = run.prepare(bench.place.load)
            bench.place.generate(pipe, 1, batch=1, count=1)  # compiles here, or shows that it cannot
        except (DiffaccelError, RuntimeError) as error:
            bench.refuse(head, "not run", error)
            continue
        spent = time.perf_counter() - began
        if spent > limit_s:
            bench.refuse(head, "not run", f"getting ready took {spent:.0f} s, more than {limit_s:g} s")
            continue
        bench.measure(head, pipe, bench.steps, run.singly, count=NOISE_PROMPTS)


def run_kind(args: argparse.Namespace, kind: str, steps: int) -> dict[str, Any]:
    """One testbed at one number of steps; says why where it has no weights."""
    began = time.perf_counter()
    place = world(kind, args.prompts or (2 if args.quick else PROMPTS[kind]), dtype=args.dtype)
    try:
        plain = place.load()
    except (FileNotFoundError, NotImplementedError) as error:
        say(f"{kind}: skipped, {error}")
        return {"kind": kind, "steps": steps, "skipped": f"no trained weights: {type(error).__name__}"}
    yard = yardstick(place, plain)
    say(f"{kind}: reference runs of {REFERENCE_STEPS} and {steps} steps")
    references = {"fine": place.generate(plain, REFERENCE_STEPS, batch=BATCH)}
    references["plain"] = place.generate(plain, steps, batch=BATCH)
    wanted = (lambda name: any(part in name for part in args.only)) if args.only else (lambda name: True)
    bench = Bench(place, steps, 0 if args.quick else args.rounds, yard, plain, references, wanted)
    context = Context(steps, world(kind, TRAIN_PROMPTS, "train", args.dtype), yard.branches)
    bench_ours(bench, context)
    bench_peers(bench, context)
    bench_baselines(bench)
    bench_noise(bench, args.prepare_limit)
    name = f"cache_quality_{kind}_{steps}{suffix(args)}.png"
    title = f"{kind} testbed, {args.dtype}, {steps} steps, {len(place.prompts)} held-out prompts (testbed only)"
    reason = draw(bench.rows, title, args.out / name)
    comparison = compare(bench.rows, steps)
    say(table(bench.rows))
    say(verdicts(comparison))
    return {
        "kind": kind,
        "steps": steps,
        "prompts": len(place.prompts),
        "branches": yard.branches,
        "plain": fidelity({"fine": references["fine"]}, references["plain"], place.prompts),
        "settings": bench.rows,
        "comparison": comparison,
        "curves": name if reason is None else {"not drawn": reason},
        "seconds": round(time.perf_counter() - began),
    }


def suffix(args: argparse.Namespace) -> str:
    """What is added to the names of the results: nothing for float32."""
    return "" if args.dtype == "float32" else f"_{args.dtype}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fidelity of step caches against what they compute.")
    parser.add_argument("--kinds", nargs="+", default=["image", "video"], choices=["image", "video"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of every run")
    parser.add_argument("--full", action="store_true", help="50 steps as well as 28")
    parser.add_argument("--quick", action="store_true", help="2 prompts and no times, unless told otherwise")
    parser.add_argument("--only", nargs="+", metavar="PART", help="settings with one of these in their names")
    parser.add_argument("--prompts", type=int, help="held-out prompts (32 images, 8 videos)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds per setting; 0: no times")
    parser.add_argument("--prepare-limit", type=float, default=60, metavar="S", help="for compiling, in seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # peers print
        runs = [run_kind(args, kind, n) for kind in args.kinds for n in ((STEPS, 50) if args.full else (STEPS,))]
    document = {
        "label": "testbed only",
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "dtype": args.dtype,
        "reference_steps": REFERENCE_STEPS,
        "batch": {"adaptive": 1, "fixed": BATCH, "timed": 1},
        "versions": {"torch": torch.__version__, **versions()},
        "threads": torch.get_num_threads(),
        "runs": runs,
        "seconds": round(time.perf_counter() - began),
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    (args.out / f"cache_quality{suffix(args)}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
