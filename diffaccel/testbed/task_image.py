"""What the image training needs: pictures, their loss (L1, L2, a little KL, noisy latents so that decoding is
smooth), and the denoiser's sizes and starting weights."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import numpy as np

from . import world
from .tasks import AutoencoderTask, DenoiserTask, Shape, Training, reconstruction_loss
from .tokenizers import TEXT_LENGTH
from .train_dit import noise_levels

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, FluxPipeline, StableDiffusion3Pipeline

_PIXELS_PER_BATCH = 16 * 64 * 64
_SIZES = ((64, 64), (64, 64), (64, 64), (64, 96), (96, 64), (96, 96))
_TOKENIZERS = threading.Lock()  # padding is state of a tokenizer, so one thread at a time


def pictures(split: str, shape: Shape, seeds: range) -> tuple[torch.Tensor, list[world.Scene]]:
    """Scenes number `seeds` of one split, [B, 3, H, W] in -1..1; seed s fixes scene and jitter."""
    import torch

    height, width = shape
    scenes = _scenes(split)
    chosen = [scenes[int(np.random.default_rng((seed, 1)).integers(len(scenes)))] for seed in seeds]
    drawn = np.stack([world.render(s, height, width, seed) for s, seed in zip(chosen, seeds, strict=True)])
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).contiguous() * 2.0 - 1.0, chosen


_CACHE: dict[str, list[world.Scene]] = {}


def _scenes(split: str) -> list[world.Scene]:
    if split not in _CACHE:
        _CACHE[split] = world.combinations(split)
    return _CACHE[split]


def set_scale(vae: AutoencoderKL) -> None:
    """Latents of mean 0 and standard deviation 1 at the smallest size."""
    scale_by(vae, pictures("train", (64, 64), range(256))[0])


def scale_by(vae: AutoencoderKL, x: torch.Tensor) -> None:
    """Set shift and scale so that the latents of pixels [B, 3, H, W] have mean 0 and standard deviation 1."""
    import torch

    with torch.no_grad():
        latents = vae.encode(x).latent_dist.mode()
    vae.register_to_config(
        shift_factor=round(latents.mean().item(), 4), scaling_factor=round(1 / latents.std().item(), 4)
    )


def encode(pipe: FluxPipeline, shape: Shape, seeds: range) -> tuple[torch.Tensor, list[world.Scene]]:
    """Packed float16 latents [N, tokens, channels] of training scenes, and the scenes."""
    import torch

    x, chosen = pictures("train", shape, seeds)
    with torch.no_grad():
        z = pipe.vae.encode(x).latent_dist.mode()
    z = (z - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    return pipe._pack_latents(z, *z.shape).half(), chosen


def shift_of(pipe: FluxPipeline, tokens: int) -> float:
    """The scheduler's shift exponent mu for a number of image tokens."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = pipe.scheduler.config
    shift: float = calculate_shift(
        tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    return shift


def prepare(pipe: FluxPipeline | StableDiffusion3Pipeline, seed: int) -> None:
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


def velocity_loss(
    pipe: FluxPipeline,
    x0: torch.Tensor,
    captions: list[str],
    shape: Shape,
    high: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Mean squared velocity error for packed latents `x0` [B, tokens, channels]."""
    import torch

    batch, tokens, _ = x0.shape
    with _TOKENIZERS:
        embeds, pooled, text_ids = pipe.encode_prompt(captions, None, max_sequence_length=TEXT_LENGTH)
    image_ids = pipe._prepare_latent_image_ids(batch, shape[0] // 8, shape[1] // 8, x0.device, x0.dtype)
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
    loss: torch.Tensor = (velocity - (noise - x0)).square().mean()
    return loss


VAE = AutoencoderTask(
    batches=tuple(((h, w), _PIXELS_PER_BATCH // (h * w)) for h, w in _SIZES),
    draw=pictures,
    loss_of=reconstruction_loss,
    set_scale=set_scale,
)
DENOISER = DenoiserTask(
    buckets={
        (64, 64): (0.90, 0.50, 28),
        (96, 96): (0.06, 0.28, 16),
        (128, 128): (0.0, 0.06, 10),
        (64, 96): (0.02, 0.08, 20),
        (96, 64): (0.02, 0.08, 20),
    },
    modules=("transformer", "text_encoder", "text_encoder_2"),
    prepare=prepare,
    encode=encode,
    loss_of=velocity_loss,
)
_SCENES: dict[Shape, int] = {(64, 64): 12_000, (96, 96): 4_000, (128, 128): 1_000, (64, 96): 1_500, (96, 64): 1_500}
TRAINING = Training(autoencoder=VAE, denoiser=DENOISER, scenes=_SCENES, vae_share=0.16)
