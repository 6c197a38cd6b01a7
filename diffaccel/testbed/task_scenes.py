"""What the training of the scenes testbed needs: pictures at two sizes, the denoiser's shares, and its loss through
SD3's own text path; one caption in ten is empty, which is what guidance subtracts."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import numpy as np

from . import scenes
from .build_scenes import T5_LENGTH
from .task_image import prepare, scale_by
from .tasks import AutoencoderTask, DenoiserTask, Shape, Training, reconstruction_loss
from .train_dit import noise_levels

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, StableDiffusion3Pipeline

_TOKENIZERS = threading.Lock()  # padding is state of a tokenizer, so one thread at a time


def pictures(split: str, shape: Shape, seeds: range) -> tuple[torch.Tensor, list[scenes.Picture]]:
    """Scenes number `seeds` of one split, [B, 3, H, W] in -1..1; seed s fixes scene and all that is left open."""
    import torch

    height, width = shape
    chosen = [scenes.sample(split, seed) for seed in seeds]
    drawn = np.stack(
        [scenes.render(picture, height, width, seed) for picture, seed in zip(chosen, seeds, strict=True)]
    )
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).contiguous() * 2.0 - 1.0, chosen


def set_scale(vae: AutoencoderKL) -> None:
    """Latents of mean 0 and standard deviation 1 at the smaller size."""
    scale_by(vae, pictures("train", (64, 64), range(256))[0])


def encode(pipe: StableDiffusion3Pipeline, shape: Shape, seeds: range) -> tuple[torch.Tensor, list[scenes.Picture]]:
    """Float16 latents [N, channels, H/4, W/4] of training scenes, and the scenes."""
    import torch

    x, chosen = pictures("train", shape, seeds)
    with torch.no_grad():
        z = pipe.vae.encode(x).latent_dist.mode()
    return ((z - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor).half(), chosen


def velocity_loss(
    pipe: StableDiffusion3Pipeline,
    x0: torch.Tensor,
    captions: list[str],
    shape: Shape,
    high: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean squared velocity error for latents `x0` [B, channels, H/4, W/4]."""
    import torch

    with _TOKENIZERS:
        embeds, _, pooled, _ = pipe.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=T5_LENGTH
        )
    level = noise_levels(len(x0), math.log(pipe.scheduler.config.shift), high, generator)
    noise = torch.randn(x0.shape, generator=generator)
    velocity = pipe.transformer(
        hidden_states=torch.lerp(x0, noise, level[:, None, None, None]),
        timestep=1000.0 * level,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    loss: torch.Tensor = (velocity - (noise - x0)).square().mean()
    return loss


VAE = AutoencoderTask(
    batches=(((64, 64), 8), ((64, 64), 8), ((64, 64), 8), ((128, 128), 2)),
    draw=pictures,
    loss_of=reconstruction_loss,
    set_scale=set_scale,
)
DENOISER = DenoiserTask(
    buckets={(64, 64): (0.88, 0.60, 32), (128, 128): (0.12, 0.40, 10)},
    modules=("transformer", "text_encoder", "text_encoder_2"),
    prepare=prepare,
    encode=encode,
    loss_of=velocity_loss,
    high_noise=(0.6, 0.4),
    early=0.75,
    check_s=420.0,
)
TRAINING = Training(
    autoencoder=VAE, denoiser=DENOISER, scenes={(64, 64): 16_000, (128, 128): 2_500}, vae_share=0.23, other_share=0.04
)
