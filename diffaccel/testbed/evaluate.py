"""The testbed's figures: does it draw what the prompt says, and is its trajectory smooth?

A shape is (height, width) for pictures and (frames, height, width) for clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import bundle, motion, scenes, scoring, world
from .prompting import prompts
from .tasks import Shape

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderKLWan

    from .bundle import Pipeline

SIZES: dict[str, tuple[Shape, ...]] = {  # the first is the cheapest
    "image": ((64, 64), (96, 96), (128, 128), (96, 64)),
    "video": ((9, 48, 48), (9, 64, 64), (17, 48, 48), (17, 64, 64)),
    "scenes": ((64, 64), (128, 128)),
}
_AT_ONCE = 32


def kind_of(pipe: Pipeline) -> str:
    """The testbed whose pipeline this is, by its class."""
    return {"FluxPipeline": "image", "WanPipeline": "video", "StableDiffusion3Pipeline": "scenes"}[type(pipe).__name__]


def name_of(shape: Shape) -> str:
    """How figures call a shape: "64x64", "9x48x48"."""
    return "x".join(map(str, shape))


def usual_shape(kind: str) -> Shape:
    """The shape of the usual call."""
    usual = bundle.call_kwargs(kind)
    return tuple(usual[key] for key in ("num_frames", "height", "width") if key in usual)


def generate(
    pipe: Pipeline,
    texts: Sequence[str],
    shape: Shape,
    steps: int = 28,
    seed: int = 0,
    **changes: Any,
) -> np.ndarray:
    """Pictures or clips [B, *shape, 3] in 0..1; prompt i starts from the noise of seed + i, whatever the batch."""
    import torch

    pipe.set_progress_bar_config(disable=True)
    size = dict(zip(("width", "height", "num_frames"), reversed(shape), strict=False))
    arguments = {**bundle.call_kwargs(kind_of(pipe)), **size, "num_inference_steps": steps, **changes}
    out = []
    for start in range(0, len(texts), _AT_ONCE):
        chunk = list(texts[start : start + _AT_ONCE])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(chunk))]
        result = pipe(chunk, generator=generators, output_type="np", **arguments)
        out.append(result.frames if len(shape) == 3 else result.images)
    return np.concatenate(out)


def _draw(text: str, shape: Shape, seed: int, kind: str) -> np.ndarray:
    *frames, height, width = shape
    if kind == "scenes":
        return scenes.render(scenes.parse(text), height, width, seed)
    if frames:
        return motion.render(motion.parse(text), frames[0], height, width, seed)
    return world.render(world.parse(text), height, width, seed)


def psnr(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB of each entry of two batches [B, ...] in 0..1."""
    error = np.maximum(((a - b) ** 2).reshape(len(a), -1).mean(axis=1), 1e-10)
    decibels: np.ndarray = -10.0 * np.log10(error)
    return decibels


def smoothness(pipe: Pipeline, count: int, shape: Shape) -> tuple[float, float]:
    """28-step against 112-step results of the same noise: (mean, lowest) PSNR in dB over test prompts."""
    texts = prompts("test", count, kind=kind_of(pipe))
    values = psnr(*(generate(pipe, texts, shape, steps) for steps in (28, 112)))
    return float(values.mean()), float(values.min())


def vae_round_trip(vae: AutoencoderKL | AutoencoderKLWan, count: int, shape: Shape, kind: str = "") -> float:
    """Mean PSNR in dB of decode(encode(x)) over held-out scenes or clips; `kind` by the shape if not given."""
    import torch

    kind = kind or ("image" if len(shape) == 2 else "video")
    texts = prompts("test", count, kind=kind)
    drawn = np.stack([_draw(text, shape, seed, kind) for seed, text in enumerate(texts)])
    x = torch.from_numpy(drawn).movedim(-1, 1).to(vae.dtype) * 2.0 - 1.0
    with torch.no_grad():
        y = vae.decode(vae.encode(x).latent_dist.mode()).sample
    back = (y.float() / 2.0 + 0.5).clamp(0.0, 1.0).movedim(1, -1).numpy()
    return float(psnr(drawn, back).mean())


def quick(pipe: Pipeline, kind: str, count: int = 32) -> dict[str, float]:
    """A cheap look during training, at the cheapest shape."""
    shape = SIZES[kind][0]
    texts = prompts("test", count, kind=kind)
    result = scoring.score(generate(pipe, texts, shape), texts)
    return {**result, "psnr_28_112_db": smoothness(pipe, min(4, count), shape)[0]}


def figures(pipe: Pipeline, kind: str, count: int = 128, smooth_count: int = 16) -> dict[str, Any]:
    """All figures of a trained pipeline."""
    texts, usual = prompts("test", count, kind=kind), usual_shape(kind)
    scores = {name_of(shape): scoring.score(generate(pipe, texts, shape), texts) for shape in SIZES[kind]}
    shapes = dict.fromkeys([SIZES[kind][0], usual])
    smooth = {name_of(shape): smoothness(pipe, smooth_count, shape) for shape in shapes}
    name = name_of(usual)
    modules = [key for key in ("transformer", "vae", "text_encoder", "text_encoder_2") if hasattr(pipe, key)]
    return {
        "size": name,
        "test_prompts": count,
        "score": scores[name]["score"],
        "scores": scores,
        "vae_round_trip_db": {name_of(shape): vae_round_trip(pipe.vae, 64, shape, kind) for shape in SIZES[kind]},
        "psnr_28_112_db": smooth[name][0],
        "psnr_28_112_by_size_db": {key: {"mean": mean, "lowest": low} for key, (mean, low) in smooth.items()},
        "smooth_prompts": smooth_count,
        "parameters": {key: sum(p.numel() for p in getattr(pipe, key).parameters()) for key in modules},
    }
