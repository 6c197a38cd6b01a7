"""Train the denoiser and both text encoders by rectified flow, through the pipeline's own encode path.

x_t = (1 - s) * x_0 + s * noise, target noise - x_0, with the noise level s drawn around the scheduler's own
resolution-dependent shift. One caption in ten is empty, so true classifier-free guidance is real.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import world
from .tokenizers import TEXT_LENGTH
from .train_vae import pictures
from .training import Average, Clock, learning_rate, load_checkpoint, save_checkpoint, say, split_gradients

if TYPE_CHECKING:
    import torch
    from diffusers import FluxPipeline

# (height, width): (share early, share late, batch); see _EARLY
BUCKETS: dict[tuple[int, int], tuple[float, float, int]] = {
    (64, 64): (0.90, 0.50, 28),
    (96, 96): (0.06, 0.28, 16),
    (128, 128): (0.0, 0.06, 10),
    (64, 96): (0.02, 0.08, 20),
    (96, 64): (0.02, 0.08, 20),
}
_PEAK_RATE = 2e-3
_EARLY = 0.87
_EMPTY = 0.1
_HIGH_NOISE = (1.5, 0.8, 0.5)  # further shift of the noise level, and its share early and late
_CHECK_S = 600.0
_TOKENIZERS = threading.Lock()  # padding is state of a tokenizer, so one thread at a time


class Latents:
    """Encoded scenes of every bucket: packed float16 latents [N, tokens, channels] and their scenes."""

    def __init__(self, pipe: FluxPipeline, counts: dict[tuple[int, int], int], threads: int = 2) -> None:
        import torch

        torch.set_num_threads(1)
        self.values: dict[tuple[int, int], torch.Tensor] = {}
        self.scenes: dict[tuple[int, int], list[world.Scene]] = {}
        seed = 10_000_000
        for (height, width), count in counts.items():

            def encode(seeds: range, height: int = height, width: int = width) -> tuple[torch.Tensor, list]:
                x, chosen = pictures("train", height, width, seeds)
                with torch.no_grad():
                    z = pipe.vae.encode(x).latent_dist.mode()
                z = (z - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
                return pipe._pack_latents(z, *z.shape).half(), chosen

            chunks = [range(seed + at, seed + min(at + 32, count)) for at in range(0, count, 32)]
            with ThreadPoolExecutor(threads) as workers:
                parts = list(workers.map(encode, chunks))
            self.values[height, width] = torch.cat([packed for packed, _ in parts])
            self.scenes[height, width] = list(itertools.chain(*(chosen for _, chosen in parts)))
            seed += count
            say(f"latents: {count} of {height}x{width}")


def shift_of(pipe: FluxPipeline, tokens: int) -> float:
    """The scheduler's shift exponent mu for a number of image tokens."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = pipe.scheduler.config
    return calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )


def noise_levels(count: int, mu: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """Noise levels s in (0, 1], [B]: logit-normal, every fourth uniform, shifted by mu; 2 % are 1.

    A share `high` is shifted further up: what the caption decides is decided at high noise.
    """
    import torch

    def uniform() -> torch.Tensor:
        return torch.rand(count, generator=generator)

    level = torch.sigmoid(torch.randn(count, generator=generator))
    level = torch.where(uniform() < 0.25, uniform(), level)
    ratio = torch.where(uniform() < high, math.exp(mu + _HIGH_NOISE[0]), math.exp(mu))
    level = ratio * level / (1.0 + (ratio - 1.0) * level)
    return torch.where(uniform() < 0.02, torch.ones(count), level.clamp(1e-3, 1.0))


def prepare(pipe: FluxPipeline, seed: int) -> None:
    """Starting weights: modulations and output at zero, so every block starts as identity."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in pipe.transformer.named_parameters():
        modulation = ".linear." in name and "norm" in name
        if modulation or name.startswith("proj_out") or name.endswith("bias"):
            parameter.data.zero_()
        elif parameter.ndim == 2:
            std = math.sqrt(2.0 / sum(parameter.shape))
            parameter.data.normal_(0.0, std, generator=generator)


def loss_of(
    pipe: FluxPipeline,
    x0: torch.Tensor,
    captions: list[str],
    height: int,
    width: int,
    high: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean squared velocity error for packed latents `x0` [B, tokens, channels]."""
    import torch

    batch, tokens, _ = x0.shape
    with _TOKENIZERS:
        embeds, pooled, text_ids = pipe.encode_prompt(captions, None, max_sequence_length=TEXT_LENGTH)
    image_ids = pipe._prepare_latent_image_ids(batch, height // 8, width // 8, x0.device, x0.dtype)
    level = noise_levels(batch, shift_of(pipe, tokens), high, generator)
    noise = torch.randn(x0.shape, generator=generator)
    noisy = torch.lerp(x0, noise, level[:, None, None])
    velocity = pipe.transformer(
        hidden_states=noisy,
        timestep=level,
        guidance=1.0 + 5.0 * torch.rand(batch, generator=generator),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=image_ids,
        return_dict=False,
    )[0]
    return (velocity - (noise - x0)).square().mean()


def train_dit(
    pipe: FluxPipeline,
    latents: Latents,
    minutes: float,
    checkpoint: Path,
    resume: bool,
    on_check: Callable[[float], None] | None = None,
    max_steps: int | None = None,
    batch_scale: float = 1.0,
    decay: float = 0.998,
    threads: int = 2,
) -> dict[str, float]:
    """Train in place and leave averaged weights; `on_check(elapsed_s)` sees them every ten minutes."""
    import numpy as np
    import torch

    modules = {name: getattr(pipe, name) for name in ("transformer", "text_encoder", "text_encoder_2")}
    if not (resume and checkpoint.exists()):
        prepare(pipe, seed=0)
    parameters = list(itertools.chain(*(m.requires_grad_(True).train().parameters() for m in modules.values())))
    optimizer = torch.optim.AdamW(parameters, lr=_PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    average = Average(parameters, decay)
    step, images, elapsed_s = 0, 0, 0.0
    if resume and checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        for name, module in modules.items():
            module.load_state_dict(saved["modules"][name])
        optimizer.load_state_dict(saved["optimizer"])
        average.load(saved["average"])
        step, images, elapsed_s = saved["step"], saved["images"], saved["elapsed_s"]
        say(f"dit: resumed at step {step}, {elapsed_s / 60:.1f} min")
    clock = Clock(minutes * 60, elapsed_s)

    def save() -> None:
        state = {"modules": {name: module.state_dict() for name, module in modules.items()}}
        state |= {"optimizer": optimizer.state_dict(), "average": average.state()}
        save_checkpoint(checkpoint, {**state, "step": step, "images": images, "elapsed_s": clock.elapsed_s})

    torch.set_num_threads(1)  # one core for each of the `threads` batch parts
    workers = ThreadPoolExecutor(threads)
    buckets = list(latents.values)
    last_save = last_say = time.monotonic()
    next_check_s = (clock.elapsed_s // _CHECK_S + 1) * _CHECK_S
    last_step = step + max_steps if max_steps is not None else None
    losses: list[float] = []
    while clock.fraction < 1.0 and step != last_step:
        draw = np.random.default_rng((step, 2))
        late = int(clock.fraction >= _EARLY)
        shares = np.array([BUCKETS[b][late] for b in buckets])
        bucket = buckets[draw.choice(len(buckets), p=shares / shares.sum())]
        count = max(threads, round(BUCKETS[bucket][2] * batch_scale))
        index = draw.integers(len(latents.scenes[bucket]), size=count)
        captions = [
            "" if draw.random() < _EMPTY else latents.scenes[bucket][i].caption(draw.choice(3, p=(0.7, 0.15, 0.15)))
            for i in index
        ]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(_PEAK_RATE, step, clock.fraction, warmup_steps=150, hold=0.8)
        x0 = latents.values[bucket][index].float()
        parts = [
            partial(
                loss_of,
                pipe,
                x0[k::threads],
                captions[k::threads],
                *bucket,
                _HIGH_NOISE[1 + late],
                torch.Generator().manual_seed(2 * step + k),
            )
            for k in range(threads)
        ]
        loss = split_gradients(parts, parameters, workers)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update()
        step, images = step + 1, images + count
        losses.append(loss)

        now = time.monotonic()
        if now - last_say > 30:
            last_say = now
            say(f"dit: {clock.fraction:4.0%} step {step} images {images} loss {sum(losses) / len(losses):.4f}")
            losses.clear()
        if now - last_save > 120:
            last_save = now
            save()
        if on_check is not None and clock.elapsed_s > next_check_s:
            next_check_s += _CHECK_S
            average.swap()
            on_check(clock.elapsed_s)
            average.swap()

    if step:
        save()
    average.swap()
    for module in modules.values():
        module.requires_grad_(False).eval()
    return {"seconds": min(clock.elapsed_s, max(elapsed_s, minutes * 60)), "images": images, "steps": step}
