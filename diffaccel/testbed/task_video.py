"""What the video training needs: clips, their loss (as for pictures), and the denoiser's sizes and weights."""

from __future__ import annotations

import copy
import math
import threading
from typing import TYPE_CHECKING

import numpy as np

from . import motion, world
from .tasks import AutoencoderTask, DenoiserTask, Shape, Training, reconstruction_loss
from .tokenizers import TEXT_LENGTH
from .train_dit import noise_levels

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKLWan, WanPipeline

_SMALLEST = 48
_TOKENIZERS = threading.Lock()  # padding is state of a tokenizer, so one thread at a time


def clips(split: str, shape: Shape, seeds: range) -> tuple[torch.Tensor, list[motion.Clip]]:
    """Clips number `seeds` of one split, [B, 3, F, H, W] in -1..1; seed s fixes clip and jitter."""
    import torch

    frames, height, width = shape
    every = motion.combinations(split)
    chosen = [every[int(np.random.default_rng((seed, 1)).integers(len(every)))] for seed in seeds]
    drawn = np.stack([motion.render(c, frames, height, width, s) for c, s in zip(chosen, seeds, strict=True)])
    return torch.from_numpy(drawn).permute(0, 4, 1, 2, 3).contiguous() * 2.0 - 1.0, chosen


def cuttings(split: str, shape: Shape, seeds: range) -> tuple[torch.Tensor, list[motion.Clip]]:
    """As `clips`; anything smaller than the smallest size is cut out of a larger clip around its shape."""
    import torch

    frames, height, width = shape
    if min(height, width) >= _SMALLEST:
        return clips(split, shape, seeds)
    side = _SMALLEST if seeds[0] // len(seeds) % 2 else 64
    whole, chosen = clips(split, (frames, side, side), seeds)
    parts = []
    for x, clip, seed in zip(whole, chosen, seeds, strict=True):
        jitter = np.random.default_rng((seed, 2)).integers(-height // 4, height // 4 + 1, size=2)
        down, across = (
            round(place * side) + j for place, j in zip(world.PLACES[clip.scene.place], jitter, strict=True)
        )
        top, left = (
            int(np.clip(down - height // 2, 0, side - height)),
            int(np.clip(across - width // 2, 0, side - width)),
        )
        parts.append(x[..., top : top + height, left : left + width])
    return torch.stack(parts), chosen


def own_state(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """The same modules with an encode and decode state of its own, so that threads do not mix theirs."""
    return copy.copy(vae)


def clip_loss(vae: AutoencoderKLWan, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Reconstruction and KL loss of clips [B, 3, F, H, W]."""
    return reconstruction_loss(own_state(vae), x, generator)


def set_scale(vae: AutoencoderKLWan) -> None:
    """Set the latents' mean and deviation per channel: the denoiser sees latents of mean 0 and deviation 1."""
    import torch

    with torch.no_grad():
        parts = [
            vae.encode(clips("train", shape, range(start, start + 32))[0]).latent_dist.mode()
            for shape in ((9, 48, 48), (9, 64, 64), (17, 48, 48))
            for start in (0, 32)
        ]
    flat = torch.cat([z.transpose(0, 1).flatten(1) for z in parts], dim=1)  # [C, all]
    vae.register_to_config(
        latents_mean=[round(value, 4) for value in flat.mean(1).tolist()],
        latents_std=[round(value, 4) for value in flat.std(1).tolist()],
    )


def encode(pipe: WanPipeline, shape: Shape, seeds: range) -> tuple[torch.Tensor, list[motion.Clip]]:
    """float16 latents [N, channels, 1 + n, H/8, W/8] of training clips, and the clips."""
    import torch

    x, chosen = clips("train", shape, seeds)
    with torch.no_grad():
        z = own_state(pipe.vae).encode(x).latent_dist.mode()
    mean, std = (
        torch.tensor(getattr(pipe.vae.config, name)).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std")
    )
    return ((z - mean) / std).half(), chosen


def prepare(pipe: WanPipeline, seed: int) -> None:
    """Starting weights: every branch's gate or output at zero, so every block starts as identity.

    The self-attentions' query and key biases are drawn, not zero: rotary positions turn them into patterns of
    relative place, without which no token of pure noise could tell where in the frame it is.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in pipe.transformer.named_parameters():
        if name.endswith(("attn1.to_q.bias", "attn1.to_k.bias")):
            parameter.data.normal_(0.0, 1.0, generator=generator)
        elif (
            name.endswith(("bias", "scale_shift_table"))
            or "time_proj" in name
            or "attn2.to_out" in name
            or name.startswith("proj_out")
        ):
            parameter.data.zero_()
        elif parameter.ndim > 1:
            flat = parameter.data.flatten(1)
            flat.normal_(0.0, math.sqrt(2.0 / sum(flat.shape)), generator=generator)


def velocity_loss(
    pipe: WanPipeline,
    x0: torch.Tensor,
    captions: list[str],
    shape: Shape,
    high: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean squared velocity error for latents `x0` [B, C, 1 + n, H/8, W/8]."""
    import torch

    with _TOKENIZERS:
        embeds, _ = pipe.encode_prompt(captions, None, False, max_sequence_length=TEXT_LENGTH)
    level = noise_levels(len(x0), math.log(pipe.scheduler.config.shift), high, generator)
    noise = torch.randn(x0.shape, generator=generator)
    noisy = torch.lerp(x0, noise, level[:, None, None, None, None])
    velocity = pipe.transformer(
        hidden_states=noisy, timestep=1000.0 * level, encoder_hidden_states=embeds, return_dict=False
    )[0]
    loss: torch.Tensor = (velocity - (noise - x0)).square().mean()
    return loss


VAE = AutoencoderTask(  # many small steps: its many per-pixel norms make it slow to start otherwise
    batches=(
        ((5, 32, 32), 6),
        ((5, 32, 32), 6),
        ((9, 48, 48), 4),
        ((5, 32, 32), 6),
        ((9, 32, 32), 6),
        ((5, 64, 64), 4),
    ),
    draw=cuttings,
    loss_of=clip_loss,
    set_scale=set_scale,
    peak_rate=1e-3,
    hold=0.5,
)
DENOISER = DenoiserTask(
    buckets={
        (9, 48, 48): (0.80, 0.30, 24),
        (9, 64, 64): (0.12, 0.35, 14),
        (17, 48, 48): (0.08, 0.20, 14),
        (17, 64, 64): (0.0, 0.15, 8),
    },
    modules=("transformer", "text_encoder"),
    prepare=prepare,
    encode=encode,
    loss_of=velocity_loss,
    high_noise=(0.6, 0.4),
    early=0.75,
    check_s=540.0,
)
_SCENES: dict[Shape, int] = {(9, 48, 48): 10_000, (9, 64, 64): 3_000, (17, 48, 48): 1_500, (17, 64, 64): 1_000}
TRAINING = Training(autoencoder=VAE, denoiser=DENOISER, scenes=_SCENES, vae_share=0.18)
