"""Train the autoencoder on drawn scenes: L1 + L2, a little KL, noisy latents so that decoding is smooth."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import world
from .training import Average, Clock, learning_rate, load_checkpoint, save_checkpoint, say, split_gradients

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL

_SIZES = ((64, 64), (64, 64), (64, 64), (64, 96), (96, 64), (96, 96))  # one size per batch, cycled
_PIXELS_PER_BATCH = 16 * 64 * 64
_PEAK_RATE = 2e-3
_KL_WEIGHT = 5e-4
_LATENT_NOISE = 0.2  # largest, in standard deviations of the latents


def pictures(split: str, height: int, width: int, seeds: range) -> tuple[torch.Tensor, list[world.Scene]]:
    """Scenes number `seeds` of one split, [B, 3, H, W] in -1..1; seed s fixes scene and jitter."""
    import torch

    scenes = _scenes(split)
    chosen = [scenes[int(np.random.default_rng((seed, 1)).integers(len(scenes)))] for seed in seeds]
    drawn = np.stack([world.render(s, height, width, seed) for s, seed in zip(chosen, seeds, strict=True)])
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).contiguous() * 2.0 - 1.0, chosen


_CACHE: dict[str, list[world.Scene]] = {}


def _scenes(split: str) -> list[world.Scene]:
    if split not in _CACHE:
        _CACHE[split] = world.combinations(split)
    return _CACHE[split]


def loss_of(vae: AutoencoderKL, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Reconstruction and KL loss of pictures [B, 3, H, W]; latents get noise, its strength per picture."""
    import torch

    posterior = vae.encode(x).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=generator)
    strength = _LATENT_NOISE * torch.rand(len(x), 1, 1, 1, generator=generator) * posterior.mean.detach().std()
    y = vae.decode(posterior.mean + (posterior.var + strength**2).sqrt() * noise).sample
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1.0 - posterior.logvar).mean()
    return (y - x).abs().mean() + 4.0 * (y - x).square().mean() + _KL_WEIGHT * kl


def train_vae(
    vae: AutoencoderKL,
    minutes: float,
    checkpoint: Path,
    resume: bool,
    max_steps: int | None = None,
    threads: int = 2,
) -> dict[str, float]:
    """Train in place, leave averaged weights, set scale and shift; returns seconds and images."""
    import torch

    torch.set_num_threads(1)  # one core for each of the `threads` batch parts
    workers = ThreadPoolExecutor(threads)
    parameters = list(vae.requires_grad_(True).train().parameters())
    optimizer = torch.optim.AdamW(parameters, lr=_PEAK_RATE, betas=(0.9, 0.98), weight_decay=1e-3)
    average = Average(parameters, 0.995)
    step, images, elapsed_s, done = 0, 0, 0.0, False
    if resume and checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        vae.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average.load(saved["average"])
        step, images, elapsed_s, done = saved["step"], saved["images"], saved["elapsed_s"], saved["done"]
        say(f"vae: resumed at step {step}, {elapsed_s / 60:.1f} min")
    clock = Clock(minutes * 60, elapsed_s)

    def save(done: bool) -> None:
        state = {"model": vae.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state()}
        save_checkpoint(
            checkpoint, {**state, "step": step, "images": images, "elapsed_s": clock.elapsed_s, "done": done}
        )

    last_save = last_say = time.monotonic()
    last_step = step + max_steps if max_steps is not None else None
    while not done and clock.fraction < 1.0 and step != last_step:
        height, width = _SIZES[step % len(_SIZES)]
        count = max(threads, _PIXELS_PER_BATCH // (height * width))
        x, _ = pictures("train", height, width, range(images, images + count))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(_PEAK_RATE, step, clock.fraction, warmup_steps=100)
        parts = [
            partial(loss_of, vae, x[k::threads], torch.Generator().manual_seed(2 * step + k)) for k in range(threads)
        ]
        loss = split_gradients(parts, parameters, workers)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update()
        step, images = step + 1, images + count

        now = time.monotonic()
        if now - last_say > 20:
            last_say = now
            say(f"vae: {clock.fraction:4.0%} step {step} images {images} loss {loss:.4f}")
        if now - last_save > 90:
            last_save = now
            save(done=False)

    if not done:
        average.swap()
        done = clock.fraction >= 1.0
        if not done:  # stopped by max_steps: keep the live weights in the checkpoint
            average.swap()
            save(done=False)
            average.swap()
        else:
            save(done=True)
    vae.requires_grad_(False).eval()
    set_scale(vae)
    return {
        "seconds": clock.elapsed_s if not resume else max(elapsed_s, min(clock.elapsed_s, minutes * 60)),
        "images": images,
    }


def set_scale(vae: AutoencoderKL) -> None:
    """Set shift and scale so that the latents the denoiser sees have mean 0 and standard deviation 1."""
    import torch

    with torch.no_grad():
        x, _ = pictures("train", 64, 64, range(256))
        latents = vae.encode(x).latent_dist.mode()
    vae.register_to_config(
        shift_factor=round(latents.mean().item(), 4), scaling_factor=round(1 / latents.std().item(), 4)
    )
