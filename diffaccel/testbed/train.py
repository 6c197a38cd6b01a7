"""Train the testbed: `python -m diffaccel.testbed.train image|video|scenes [--minutes 85] [--out DIR] [--resume]`.

The autoencoder comes first, then the denoiser with its text encoders; both anneal to the end of their
share of the budget, whatever the machine. Progress goes to stderr, the final figures as JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import build, build_scenes, build_video, bundle, evaluate, task_image, task_scenes, task_video
from .tasks import Training
from .train_dit import Latents, train_dit
from .train_vae import train_vae
from .training import say

_PROVISIONAL_S = 1200.0  # from here on, each check leaves usable weights in the output folder
TRAININGS: dict[str, Training] = {
    "image": task_image.TRAINING,
    "video": task_video.TRAINING,
    "scenes": task_scenes.TRAINING,
}


def train(
    kind: str,
    minutes: float,
    out: Path,
    work: Path,
    resume: bool,
    size: build.Size | build_video.VideoSize | build_scenes.ScenesSize | None = None,
    threads: int = 2,
) -> dict[str, Any]:
    """Train, export to `out`, and return the figures of the exported (float16) weights."""
    import torch

    plan = TRAININGS[kind]
    pipe = bundle.untrained(kind, seed=1, size=size)
    vae_run = train_vae(pipe.vae, plan.autoencoder, minutes * plan.vae_share, work / "vae.pt", resume, threads=threads)
    cheapest = evaluate.SIZES[kind][0]
    trip_db = evaluate.vae_round_trip(pipe.vae, 64, cheapest, kind)
    say(f"vae: round trip {trip_db:.2f} dB, {vae_run['images']} seen")

    small = min(1.0, minutes / 60)
    counts = {bucket: max(64, int(plan.scenes[bucket] * small)) for bucket in plan.denoiser.buckets}
    latents = Latents(pipe, plan.denoiser, counts, threads)

    def check(elapsed_s: float) -> None:
        result = evaluate.quick(pipe, kind)
        say("check: " + json.dumps({key: round(value, 3) for key, value in result.items()}))
        if elapsed_s >= _PROVISIONAL_S:
            bundle.export(pipe, out)
            (out / "figures.json").write_text(json.dumps({"provisional": True, **result}, indent=2) + "\n")
            say(f"provisional weights in {out}")

    dit_minutes = minutes * (1 - plan.vae_share - plan.other_share)
    dit_run = train_dit(
        pipe, plan.denoiser, latents, dit_minutes, work / "dit.pt", resume, on_check=check, threads=threads
    )
    torch.set_num_threads(threads)
    bundle.export(pipe, out)
    say(f"weights in {out}; computing the figures")

    few = minutes < 5
    exported = bundle.read(kind, out, torch.float32)
    result = evaluate.figures(exported, kind, 16 if few else 128, 4 if few else 16)
    result["training"] = {"vae": vae_run, "transformer": dit_run, "minutes_budget": minutes}
    (out / "figures.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    """The command line; `argv` without the program's name."""
    parser = argparse.ArgumentParser(prog="python -m diffaccel.testbed.train", description=__doc__)
    parser.add_argument("kind", choices=bundle.KINDS)
    parser.add_argument("--minutes", type=float, default=85.0, help="wall-clock budget on this machine")
    parser.add_argument("--out", type=Path, help="folder for the weights (default: the package's own)")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (default: runs/testbed-KIND)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --work")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)

    kind = arguments.kind
    out = arguments.out or bundle.WEIGHTS / kind
    work = arguments.work or Path("runs") / f"testbed-{kind}"
    result = train(kind, arguments.minutes, out, work, arguments.resume, threads=arguments.threads)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
