"""Speed and fidelity of the demo's levels and rivals, by the function behind `diffaccel demo`.

    python benchmarks/demo_bench.py                               # the three levels, each beside its rivals
    python benchmarks/demo_bench.py --tolerances 0.002 0.01 0.04  # a sweep of the tolerance instead
    python benchmarks/demo_bench.py --video                       # the same with the video pipeline

Prints one JSON document and writes it to --out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from diffaccel.cli.demo import demo
from diffaccel.cli.rounds import PLAIN, Strength

AIM = {"run": "balanced", "speedup": 1.4, "psnr": 28.0}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and fidelity of the demo's runs.")
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--tolerances", type=float, nargs="+", metavar="T")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    kind, preset, name = ("video", "auto", "demo_video.json") if args.video else ("image", "cpu-demo", "demo.json")
    out = args.out or Path(__file__).parent / "results" / name
    strengths = None
    if args.tolerances:
        swept = (Strength(f"{value:g}", preset, {"cache_tolerance": value}) for value in args.tolerances)
        strengths = (PLAIN, *swept)
    document, _ = demo(args.steps, args.prompts, args.rounds, args.seed, kind=kind, strengths=strengths)
    if not args.video:
        document["aim"] = AIM | {"met": _met(document["runs"])}
    text = json.dumps(document, indent=1, allow_nan=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    print(text)


def _met(runs: list[dict]) -> bool | None:
    """Whether the preset as it is reached the aim; None in a sweep."""
    for run in runs:
        if run["name"] == AIM["run"]:
            close = run["identical"] or run["psnr"] >= AIM["psnr"]
            return close and run["speedup"] >= AIM["speedup"]
    return None


if __name__ == "__main__":
    main()
