"""What a gap's price says about a picture's PSNR, and whether `min_psnr_db` holds what it promises.

    python benchmarks/adaptive_fidelity.py [--worlds image,video,scenes] [--shifts 1,3] [--prompts 12]

First, pictures at several tolerances on training prompts: (price, PSNR to plain) of each. From them the table of
`caching/fidelity.py`: one line through all worlds' pictures, with the margin that the worst world needs when the line
is fitted on the others. Then, on held-out prompts, min_psnr_db of 30, 35 and 40 by a table fitted on the other worlds,
and by a calibration of this world: the share of pictures not below the target less 2 dB, and the mean overshoot.
Rows are written below benchmarks/results as they come, and are not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_runs import World, psnr_each, world

from diffaccel import accelerate, testbed
from diffaccel.caching.fidelity import Fit, fit

STEPS = 28
RESULTS = Path(__file__).parent / "results" / "adaptive_fidelity.json"
TOLERANCES = (0.003, 0.01, 0.03, 0.1, 0.3)
TARGETS_DB = (30.0, 35.0, 40.0)
SLACK_DB = 2.0


def pictures(place: World, shift: float, reference: np.ndarray, options: dict[str, Any]) -> list[dict[str, float]]:
    """One entry per prompt: price of its gaps, computed steps, PSNR to plain."""
    pipe = accelerate(testbed.with_shift(place.load(), shift), None, strict=True, cache="adaptive", **options)
    found = []
    for index in range(len(place.prompts)):
        one = World(place.kind, (place.prompts[index],), place.seed + index, place.dtype)
        image = one.generate(pipe, STEPS)
        report = pipe.acceleration.report
        steps = {step.index for step in report.steps if step.computed}
        price = report.stats["cache.adaptive"]["price"][0]
        db = float(psnr_each(reference[index : index + 1], image)[0])
        found.append({"price": price, "computed": len(steps), "psnr_db": round(db, 2)})
    return found


def pooled(rows: dict[str, Any], kinds: list[str]) -> tuple[list[float], list[float]]:
    """Prices and PSNR of all pictures of these worlds."""
    found = [p for row in rows.values() if row["world"] in kinds for p in row.get("pictures", []) if p["price"] > 0]
    return [p["price"] for p in found], [p["psnr_db"] for p in found]


def table(rows: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """The line through these worlds, and the margin that covers a world that was left out."""
    whole, left_out = fit(*pooled(rows, kinds)), {}
    for kind in kinds if len(kinds) > 1 else []:
        other = fit(*pooled(rows, [k for k in kinds if k != kind]))
        prices, truth = pooled(rows, [kind])
        short = [other.estimate_db(p) - t for p, t in zip(prices, truth, strict=True)]
        left_out[kind] = round(float(np.quantile(short, 0.9)), 2)
    margin = max([whole.margin, *left_out.values()])
    return {"level": round(whole.level, 2), "slope": round(whole.slope, 2), "margin": round(margin, 2), "of": left_out}


def check(found: list[dict[str, float]], target: float) -> dict[str, float]:
    """Does the promise hold?"""
    db = np.array([p["psnr_db"] for p in found])
    steps = np.mean([p["computed"] for p in found])
    held = float(np.mean(db >= target - SLACK_DB))
    return {
        "held": round(held, 3),
        "overshoot_db": round(float(db.mean() - target), 2),
        "computed": round(float(steps), 2),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=lambda text: text.split(","), default=["image", "video", "scenes"])
    parser.add_argument("--shifts", type=lambda text: [float(s) for s in text.split(",")], default=[1.0, 3.0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows, checks = kept.get("rows", {}), kept.get("checks", {})

    def write(**more: Any) -> None:
        args.out.write_text(
            json.dumps({"script": "benchmarks/adaptive_fidelity.py", "rows": rows, **more}, indent=1) + "\n"
        )

    def reference(place: World, shift: float) -> np.ndarray:
        return place.generate(testbed.with_shift(place.load(), shift), STEPS)

    for kind in args.worlds:
        count = max(4, args.prompts // 2) if kind == "video" else args.prompts
        place = world(kind, count, "train")
        for shift in args.shifts:
            missing = [t for t in TOLERANCES if f"{kind}/{shift}/{t}" not in rows]
            plain = reference(place, shift) if missing else None
            for tolerance in missing:
                found = pictures(place, shift, plain, {"cache_tolerance": tolerance})
                rows[f"{kind}/{shift}/{tolerance}"] = {"world": kind, "shift": shift, "pictures": found}
                write(checks=checks)
                told = {key: round(float(np.mean([p[key] for p in found])), 4) for key in found[0]}
                print(kind, shift, tolerance, told, flush=True)
    fits = {"all": table(rows, args.worlds)}
    for kind in args.worlds:
        fits[f"without {kind}"] = table(rows, [k for k in args.worlds if k != kind])
        own = fit(*pooled(rows, [kind]))
        fits[f"only {kind}"] = {
            "level": round(own.level, 2),
            "slope": round(own.slope, 2),
            "margin": round(own.margin, 2),
        }
    print(json.dumps(fits, indent=1), flush=True)
    for kind in args.worlds:
        place = world(kind, max(4, args.prompts // 2) if kind == "video" else args.prompts, "test")
        for shift in args.shifts:
            plain = None
            for origin in (f"without {kind}", f"only {kind}"):
                made = fits[origin]
                numbers = Fit(made["level"], made["slope"], made["margin"])
                for target in TARGETS_DB:
                    key = f"{kind}/{shift}/{origin}/{target:g}/{numbers.tolerance(target):.3g}"
                    if key not in checks:
                        plain = reference(place, shift) if plain is None else plain
                        options = {"cache_min_psnr_db": target}
                        options["cache_calibration"] = (numbers.level, numbers.slope, numbers.margin)
                        checks[key] = check(pictures(place, shift, plain, options), target)
                        write(checks=checks, fits=fits)
                    print(key, checks[key], flush=True)
    write(checks=checks, fits=fits)


if __name__ == "__main__":
    main()
