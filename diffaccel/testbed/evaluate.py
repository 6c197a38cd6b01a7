"""The testbed's figures: does it draw what the prompt says, and is its trajectory smooth?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import scoring, world
from .tokenizers import TEXT_LENGTH

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, FluxPipeline

SIZES: tuple[tuple[int, int], ...] = ((64, 64), (96, 96), (128, 128), (96, 64))  # height, width


def generate(
    pipe: FluxPipeline, prompts: Sequence[str], height: int, width: int, steps: int = 28, seed: int = 0
) -> np.ndarray:
    """Pictures [B, H, W, 3] in 0..1; prompt i starts from the noise of seed + i, whatever the batch."""
    import torch

    pipe.set_progress_bar_config(disable=True)
    out = []
    for start in range(0, len(prompts), 32):
        chunk = list(prompts[start : start + 32])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(chunk))]
        result = pipe(
            chunk,
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=3.5,
            max_sequence_length=TEXT_LENGTH,
            generator=generators,
            output_type="np",
        )
        out.append(result.images)
    return np.concatenate(out)


def psnr(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio per picture in dB, for [B, H, W, 3] in 0..1."""
    error = np.maximum(((a - b) ** 2).mean(axis=(1, 2, 3)), 1e-10)
    return -10.0 * np.log10(error)


def smoothness(pipe: FluxPipeline, count: int, height: int, width: int) -> tuple[float, float]:
    """28-step against 112-step pictures of the same noise: (mean, lowest) PSNR in dB over test prompts."""
    prompts = world.prompts("test", count)
    values = psnr(*(generate(pipe, prompts, height, width, steps) for steps in (28, 112)))
    return float(values.mean()), float(values.min())


def vae_round_trip(vae: AutoencoderKL, count: int, height: int, width: int) -> float:
    """Mean PSNR in dB of decode(encode(picture)) over held-out scenes."""
    import torch

    scenes = [world.parse(prompt) for prompt in world.prompts("test", count)]
    drawn = np.stack([world.render(scene, height, width, seed) for seed, scene in enumerate(scenes)])
    x = torch.from_numpy(drawn).permute(0, 3, 1, 2).to(vae.dtype) * 2.0 - 1.0
    with torch.no_grad():
        y = vae.decode(vae.encode(x).latent_dist.mode()).sample
    back = (y.float() / 2.0 + 0.5).clamp(0.0, 1.0).permute(0, 2, 3, 1).numpy()
    return float(psnr(drawn, back).mean())


def quick(pipe: FluxPipeline, count: int = 32) -> dict[str, float]:
    """A cheap look during training, at 64x64."""
    prompts = world.prompts("test", count)
    result = scoring.score(generate(pipe, prompts, 64, 64), prompts)
    return {**result, "psnr_28_112_db": smoothness(pipe, min(4, count), 64, 64)[0]}


def figures(pipe: FluxPipeline, default: tuple[int, int], count: int = 128, smooth_count: int = 16) -> dict:
    """All figures of a trained pipeline; `default` is the (height, width) of the usual call."""
    prompts = world.prompts("test", count)
    scores = {
        f"{height}x{width}": scoring.score(generate(pipe, prompts, height, width), prompts) for height, width in SIZES
    }
    smooth = {f"{h}x{w}": smoothness(pipe, smooth_count, h, w) for h, w in dict.fromkeys([(64, 64), default])}
    name = f"{default[0]}x{default[1]}"
    modules = ("transformer", "vae", "text_encoder", "text_encoder_2")
    return {
        "size": name,
        "test_prompts": count,
        "score": scores[name]["score"],
        "scores": scores,
        "vae_round_trip_db": {f"{h}x{w}": vae_round_trip(pipe.vae, 64, h, w) for h, w in SIZES},
        "psnr_28_112_db": smooth[name][0],
        "psnr_28_112_by_size_db": {key: {"mean": mean, "lowest": low} for key, (mean, low) in smooth.items()},
        "smooth_prompts": smooth_count,
        "parameters": {key: sum(p.numel() for p in getattr(pipe, key).parameters()) for key in modules},
    }
