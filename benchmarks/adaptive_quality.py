"""The adaptive cache against fewer steps and the peers, on every trained world under every shift.

    python benchmarks/adaptive_quality.py [--worlds image,video,scenes] [--shifts 1,3,dynamic] [--dtype float32]

One row per setting: mean PSNR in dB to the plain 28-step pictures, its lowest tenth over prompts, and the mean number
of computed steps, counted at the denoiser's linear layers for ours and the peers alike. Each prompt runs by itself
where a method decides by content. Rows are written below benchmarks/results as they come and are not run again;
`--summary` prints what they say: leads at equal computed steps (interpolated between the settings of one method), and
the computed steps that 35, 40 and 45 dB need. Baselines and peers are swept in the same run; the best peer is the best
of all peers' curves at that point, so that its options are searched on the very prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_runs import World, counting, psnr_each, world, yardstick

from diffaccel import accelerate, testbed

STEPS = 28
RESULTS = Path(__file__).parent / "results" / "adaptive_quality.json"
PROMPTS = {"image": 16, "scenes": 16, "video": 8}
EVALUATIONS = (6, 7, 8, 9, 10, 12, 14, 16, 18, 20)
POINTS = (8, 9, 10, 11, 12, 13, 14, 15, 16)
TARGETS_DB = (35, 40, 45)
REFUSED = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, AssertionError, ImportError)


@dataclass(frozen=True)
class Setting:
    """One setting of one method: `prepare` readies a fresh pipeline; `singly`: it decides by content."""

    method: str
    name: str
    prepare: Callable[[Any], Any]
    steps: int = STEPS
    singly: bool = False
    group: str = "peer"


def _solver(name: str) -> Callable[[Any], None]:
    def prepare(pipe: Any) -> None:
        import diffusers

        config = dict(pipe.scheduler.config)
        if name == "unipc":
            flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
            flow |= {"flow_shift": config.get("shift", 1.0)}
            pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(config, **flow)

    return prepare


def _native(config: str, **options: Any) -> Callable[[Any], None]:
    def prepare(pipe: Any) -> None:
        import diffusers

        pipe.transformer.enable_cache(getattr(diffusers, config)(**options))

    return prepare


def _dit(threshold: float) -> Callable[[Any], None]:
    def prepare(pipe: Any) -> None:
        import cache_dit

        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, residual_diff_threshold=threshold
        )
        cache_dit.enable_cache(pipe, config, cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=1))

    return prepare


def _ours(**options: Any) -> Callable[[Any], None]:
    return lambda pipe: accelerate(pipe, None, strict=True, **options)


def settings(kind: str) -> Iterator[Setting]:
    """All of them, baselines first."""
    for count in EVALUATIONS:
        yield Setting("euler", f"euler-{count}", _solver("euler"), count, group="baseline")
        yield Setting("unipc", f"unipc-{count}", _solver("unipc"), count, group="baseline")
    for tolerance in (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.6, 2.0):
        options = {"cache": "adaptive", "cache_tolerance": tolerance}
        yield Setting("adaptive", f"adaptive-{tolerance:g}", _ours(**options), singly=True, group="ours")
    for order in (1, 2):
        for interval in (2, 3, 4, 5, 6):
            more = {"cache_interval": interval, "disable_cache_before_step": 3, "max_order": order}
            prepare = _native("TaylorSeerCacheConfig", use_lite_mode=True, **more)
            yield Setting(f"taylorseer-o{order}", f"taylorseer-o{order}-n{interval}", prepare)
    for threshold in (0.05, 0.1, 0.2, 0.35):
        prepare = _native("FirstBlockCacheConfig", threshold=threshold)
        yield Setting("first_block", f"first_block-{threshold:g}", prepare, singly=True)
    for threshold in (0.04, 0.08, 0.16, 0.32, 0.6):
        yield Setting("cache-dit", f"cache-dit-{threshold:g}", _dit(threshold), singly=True)


def run(place: World, shift: float | str, setting: Setting, reference: np.ndarray, yard: Any) -> dict[str, Any]:
    """One row."""
    pipe = testbed.with_shift(place.load(), shift)
    setting.prepare(pipe)
    with counting(pipe) as work:
        pictures = place.generate(pipe, setting.steps, batch=1 if setting.singly else 8)
    computed = yard.counts(work, len(place.prompts))["computed"] / doubled(place, pipe)
    found = psnr_each(reference, pictures)
    return {
        "computed": round(float(computed), 3),
        "psnr_db": round(float(found.mean()), 3),
        "lowest_tenth_db": round(lowest_tenth(found), 3),
        "each_db": [round(float(value), 2) for value in found],
    }


def doubled(place: World, pipe: Any) -> int:
    """2 where one call holds both guidance branches, which are counted as two samples."""
    kwargs = testbed.call_kwargs(place.kind)
    return 2 if kwargs.get("guidance_scale", 1.0) > 1 and type(pipe).__name__ == "StableDiffusion3Pipeline" else 1


def lowest_tenth(values: np.ndarray) -> float:
    """Mean of the lowest tenth, at least one."""
    return float(np.sort(values)[: max(1, round(len(values) / 10))].mean())


def measure(args: argparse.Namespace) -> None:
    """Run what is missing, a row at a time."""
    rows = read(args.out)
    for kind in args.worlds:
        place = world(kind, args.prompts or PROMPTS[kind], dtype=args.dtype)
        reference: dict[str, np.ndarray] = {}
        yard = yardstick(place, place.load())
        for shift in args.shifts:
            for setting in settings(kind):
                key = "/".join((kind, str(shift), args.dtype, setting.name))
                if key in rows or (args.only and setting.method not in args.only):
                    continue
                if str(shift) not in reference:
                    reference[str(shift)] = place.generate(testbed.with_shift(place.load(), shift), STEPS)
                row: dict[str, Any] = {"world": kind, "shift": shift, "dtype": args.dtype, "method": setting.method}
                row |= {"name": setting.name, "group": setting.group, "prompts": len(place.prompts)}
                try:
                    row |= run(place, shift, setting, reference[str(shift)], yard)
                except REFUSED as error:
                    row["fails"] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
                rows[key] = row
                write(args.out, rows)
                told = (
                    row.get("fails") or f"{row['computed']:6.2f} {row['psnr_db']:6.2f} ({row['lowest_tenth_db']:.2f})"
                )
                print(f"{time.strftime('%H:%M:%S')} {key:44} {told}", flush=True)


def read(path: Path) -> dict[str, Any]:
    """Rows by key."""
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def write(path: Path, rows: dict[str, Any]) -> None:
    """All rows."""
    about = {"script": "benchmarks/adaptive_quality.py", "steps": STEPS, "torch": torch.__version__}
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


# ---- what the rows say ---------------------------------------------------------------------------------------------


def curve(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(computed, dB) of one method, rising in both: more computed steps are never chosen for a worse picture."""
    points: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: (row["computed"], -row[key])):
        if not points or (row[key] > points[-1][1] and row["computed"] > points[-1][0]):
            points.append((row["computed"], row[key]))
    return points


def at(points: Sequence[tuple[float, float]], computed: float) -> float | None:
    """dB at a number of computed steps; None below the curve's beginning."""
    if not points or computed < points[0][0]:
        return None
    return float(np.interp(computed, *zip(*points, strict=True)))


def needed(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Computed steps at which a curve reaches a target; None where it never does."""
    for before, after in zip([(points[0][0], points[0][1])] if points else [], points, strict=False):
        if after[1] >= target:
            return before[0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 < target <= y1:
            return x0 + (target - y0) / (y1 - y0) * (x1 - x0)
    return None


def summary(rows: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Per world and shift: leads at equal computed steps, and steps needed."""
    out: dict[str, Any] = {}
    for kind, shift in dict.fromkeys((row["world"], str(row["shift"])) for row in rows.values()):
        mine = [
            row
            for row in rows.values()
            if (row["world"], str(row["shift"]), row["dtype"]) == (kind, shift, dtype) and "fails" not in row
        ]
        methods = {row["method"]: row["group"] for row in mine}
        found: dict[str, Any] = {}
        for key in ("psnr_db", "lowest_tenth_db"):
            curves = {m: curve([row for row in mine if row["method"] == m], key) for m in methods}
            table = {m: [at(points, n) for n in POINTS] for m, points in curves.items()}
            found[key] = {m: [None if v is None else round(v, 1) for v in values] for m, values in table.items()}
            found[key + "_lead"] = {
                group: [_lead(table, methods, group, i) for i in range(len(POINTS))] for group in ("peer", "baseline")
            }
            if key == "psnr_db":
                found["needed"] = {m: [_round(needed(c, t)) for t in TARGETS_DB] for m, c in curves.items()}
        out[f"{kind}/{shift}"] = found
    return out


def _lead(table: dict[str, list[float | None]], methods: dict[str, str], group: str, i: int) -> float | None:
    ours = table.get("adaptive", [None] * len(POINTS))[i]
    theirs = [values[i] for m, values in table.items() if methods[m] == group and values[i] is not None]
    best = max((value for value in theirs if value is not None), default=None)
    return None if ours is None or best is None else round(ours - best, 2)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=lambda text: text.split(","), default=["image", "video", "scenes"])
    parser.add_argument("--shifts", type=lambda text: text.split(","), default=["1", "3", "dynamic"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", type=lambda text: text.split(","), help="methods")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true", help="only say what the rows say")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.shifts = [shift if shift == "dynamic" else float(shift) for shift in args.shifts]
    if not args.summary:
        measure(args)
    found = summary(read(args.out), args.dtype)
    for place, said in found.items():
        print(f"\n{place}, computed steps {POINTS}")
        for method, values in said["psnr_db"].items():
            print(f"  {method:14} {values}   needs {said['needed'][method]} for {TARGETS_DB} dB")
        low = said["lowest_tenth_db_lead"]["peer"]
        print(f"  lead over the best peer {said['psnr_db_lead']['peer']}, lowest tenth {low}")
        print(f"  lead over fewer steps   {said['psnr_db_lead']['baseline']}")


if __name__ == "__main__":
    main()
