"""Train the testbed: `python -m diffaccel.testbed.train image [--minutes 85] [--out DIR] [--resume]`.

The autoencoder comes first, then the denoiser with its text encoders; both anneal to the end of their
share of the budget, whatever the machine. Progress goes to stderr, the final figures as JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import bundle, evaluate
from .build import Size, pipeline
from .train_dit import BUCKETS, Latents, train_dit
from .train_vae import train_vae
from .training import say

_VAE_SHARE = 0.16
_OTHER_SHARE = 0.03  # encoding the scenes once
_PROVISIONAL_S = 1200.0  # from here on, each check leaves usable weights in the output folder
_SCENES = {(64, 64): 12_000, (96, 96): 4_000, (128, 128): 1_000, (64, 96): 1_500, (96, 64): 1_500}


def train(minutes: float, out: Path, work: Path, resume: bool, size: Size | None = None, threads: int = 2) -> dict:
    """Train, export to `out`, and return the figures of the exported (float16) weights."""
    import torch
    from diffusers import FluxPipeline

    pipe = pipeline(size, seed=1)
    vae_run = train_vae(pipe.vae, minutes * _VAE_SHARE, work / "vae.pt", resume, threads=threads)
    say(f"vae: round trip {evaluate.vae_round_trip(pipe.vae, 64, 64, 64):.2f} dB, {vae_run['images']} images")

    small = min(1.0, minutes / 60)
    latents = Latents(pipe, {bucket: max(64, int(_SCENES[bucket] * small)) for bucket in BUCKETS}, threads)

    def check(elapsed_s: float) -> None:
        result = evaluate.quick(pipe)
        say("check: " + json.dumps({key: round(value, 3) for key, value in result.items()}))
        if elapsed_s >= _PROVISIONAL_S:
            bundle.export(pipe, out)
            (out / "figures.json").write_text(json.dumps({"provisional": True, **result}, indent=2) + "\n")
            say(f"provisional weights in {out}")

    dit_minutes = minutes * (1 - _VAE_SHARE - _OTHER_SHARE)
    dit_run = train_dit(pipe, latents, dit_minutes, work / "dit.pt", resume, on_check=check, threads=threads)
    torch.set_num_threads(threads)
    bundle.export(pipe, out)
    say(f"weights in {out}; computing the figures")

    pipe = FluxPipeline.from_pretrained(str(out), dtype=torch.float32, local_files_only=True)
    usual = bundle.call_kwargs("image")
    few = minutes < 5
    result = evaluate.figures(pipe, (usual["height"], usual["width"]), 16 if few else 128, 4 if few else 16)
    result["training"] = {"vae": vae_run, "transformer": dit_run, "minutes_budget": minutes}
    (out / "figures.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diffaccel.testbed.train", description=__doc__)
    parser.add_argument("kind", choices=bundle.KINDS)
    parser.add_argument("--minutes", type=float, default=85.0, help="wall-clock budget on this machine")
    parser.add_argument("--out", type=Path, help="folder for the weights (default: the package's own)")
    parser.add_argument("--work", type=Path, default=Path("runs/testbed-image"), help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --work")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)

    out = arguments.out or bundle.WEIGHTS / arguments.kind
    result = train(arguments.minutes, out, arguments.work, arguments.resume, threads=arguments.threads)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
