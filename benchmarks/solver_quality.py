"""The solver against the schedulers of diffusers, at equal numbers of evaluations, on every trained world.

    python benchmarks/solver_quality.py [--worlds image,scenes,scenes:1,video,video:1] [--shifts 1,3] [--dtype float32]

A world may be given with a guidance scale ("scenes:3"); without one it runs as its pipeline is used (image: distilled
guidance, one call a step; scenes 7, video 4). One row per setting: PSNR in dB to the true solution of the ODE (a run
of 200 evaluations of second order; `--check` says how near UniPC comes to it with as many) and to the plain 28 steps,
mean and lowest tenth over prompts. Rows are written below benchmarks/results as they come and are not run again;
`--summary` prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_runs import World, psnr_each, world

from diffaccel import accelerate, testbed

RESULTS = Path(__file__).parent / "results" / "solver_quality.json"
PROMPTS = {"image": 5, "scenes": 5, "video": 2}
EVALUATIONS = (9, 14, 20)
PLAIN, TRUE = 28, 200
OURS: dict[str, dict[str, Any]] = {
    "abm": {},
    "adaptive": {"solver_grid": "adaptive", "solver_tolerance": 1e-6},  # as many as the call has steps
    "ab2": {"solver_order": 2, "solver_corrector": False},
}
TOLERANCES = (0.1, 0.05, 0.02, 0.01, 0.005)  # of the adaptive grid, with 60 steps as its ceiling
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


def prepared(pipe: Any, method: str, tolerance: float | None = None) -> Any:
    """A pipeline that samples by a method."""
    import diffusers

    config = dict(pipe.scheduler.config)
    if method in OURS:
        more = {} if tolerance is None else {"solver_tolerance": tolerance}
        return accelerate(pipe, None, strict=True, solver="abm", **OURS[method] | more)
    kinds = {"unipc": "UniPCMultistepScheduler", "dpm++": "DPMSolverMultistepScheduler"}
    if method in kinds:
        shift = float(config.get("shift", 1.0))
        flow = FLOW | {"flow_shift": shift}
        if type(pipe).__name__ == "FluxPipeline":  # it tells its scheduler an exponent, and DPM++ takes one only so
            flow |= {"use_dynamic_shifting": True, "base_shift": math.log(shift), "max_shift": math.log(shift)}
        pipe.scheduler = getattr(diffusers, kinds[method]).from_config(config | flow)
    return pipe


def settings(check: bool) -> Iterator[tuple[str, str, int, float | None]]:
    """(name, method, steps, tolerance) of each row."""
    if check:
        yield f"unipc-{TRUE}", "unipc", TRUE, None
    yield f"euler-{PLAIN}", "euler", PLAIN, None
    for count in EVALUATIONS:
        for method in ("euler", "unipc", "dpm++", "ab2", "abm", "adaptive"):
            yield f"{method}-{count}", method, count, None
    for tolerance in TOLERANCES:
        yield f"adaptive-{tolerance:g}", "adaptive", 60, tolerance


def lowest_tenth(values: np.ndarray) -> float:
    """Mean of the lowest tenth, at least one."""
    return float(np.sort(values)[: max(1, round(len(values) / 10))].mean())


def generate(place: World, pipe: Any, steps: int, guidance: float | None) -> np.ndarray:
    """The world's pictures."""
    more = {} if guidance is None else {"guidance_scale": guidance}
    return place.generate(pipe, steps, **more)


def measure(args: argparse.Namespace) -> None:
    """Run what is missing, a row at a time."""
    rows = read(args.out)
    for told in args.worlds:
        kind, _, scale = told.partition(":")
        guidance = float(scale) if scale else None
        place = world(kind, args.prompts or PROMPTS[kind], dtype=args.dtype)
        true: np.ndarray | None = None
        for shift in args.shifts:
            known: dict[str, np.ndarray] = {}
            for name, method, steps, tolerance in settings(args.check):
                key = "/".join((told, str(shift), args.dtype, name))
                if key in rows or (args.only and method not in args.only):
                    continue
                if not known:
                    true = solution(place, guidance) if true is None else true
                    plain = testbed.with_shift(place.load(), shift)
                    known = {"true": true, "plain": generate(place, plain, PLAIN, guidance)}
                pipe = prepared(testbed.with_shift(place.load(), shift), method, tolerance)
                pictures = generate(place, pipe, steps, guidance)
                row: dict[str, Any] = {"world": told, "shift": shift, "method": method, "evaluations": steps}
                if method in OURS:
                    row |= pipe.acceleration.report.stats["solver.abm"]
                for against, reference in known.items():
                    found = psnr_each(reference, pictures)
                    row |= {f"{against}_db": round(float(found.mean()), 2)}
                    row |= {f"{against}_tenth_db": round(lowest_tenth(found), 2)}
                rows[key] = row
                write(args.out, rows)
                print(
                    f"{time.strftime('%H:%M:%S')} {key:40} {row['evaluations']:3} evaluations, to the true solution "
                    f"{row['true_db']:.1f} ({row['true_tenth_db']:.1f}), to plain {row['plain_db']:.1f}",
                    flush=True,
                )


def solution(place: World, guidance: float | None) -> np.ndarray:
    """The true solution, which no shift changes."""
    return generate(place, prepared(testbed.with_shift(place.load(), 2.0), "ab2"), TRUE, guidance)


def read(path: Path) -> dict[str, Any]:
    """Rows by key."""
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def write(path: Path, rows: dict[str, Any]) -> None:
    """All rows."""
    about = {"script": "benchmarks/solver_quality.py", "torch": torch.__version__}
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def summary(args: argparse.Namespace) -> None:
    """A table per world and shift: PSNR to the true solution, mean (lowest tenth)."""
    rows = read(args.out)
    for place in dict.fromkeys((row["world"], row["shift"]) for row in rows.values()):
        here = {key.split("/")[-1]: row for key, row in rows.items() if (row["world"], row["shift"]) == place}
        print(f"\n{place[0]}, shift {place[1]}: plain {PLAIN} Euler steps {cell(here.get(f'euler-{PLAIN}'))}")
        for count in EVALUATIONS:
            methods = ("euler", "dpm++", "unipc", "ab2", "abm", "adaptive")
            cells = [f"{method} {cell(here.get(f'{method}-{count}'))}" for method in methods]
            print(f"  {count:2}: {'  '.join(cells)}")
        found = [here[f"adaptive-{t:g}"] for t in TOLERANCES if f"adaptive-{t:g}" in here]
        print("  to a tolerance:", "  ".join(f"{cell(row)} @ {row['evaluations']}" for row in found))


def cell(row: dict[str, Any] | None) -> str:
    """Mean (lowest tenth)."""
    return "-" if row is None else f"{row['true_db']:.1f} ({row['true_tenth_db']:.1f})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--worlds", type=lambda text: text.split(","), default=["image", "scenes", "scenes:1", "video"]
    )
    parser.add_argument("--shifts", type=lambda text: [float(s) for s in text.split(",")], default=[1.0, 3.0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="UniPC's fine run as well")
    parser.add_argument("--summary", action="store_true")
    args = parser.parse_args()
    summary(args) if args.summary else measure(args)


if __name__ == "__main__":
    main()
