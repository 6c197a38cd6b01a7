"""What the tiny pipelines share: deterministic embeddings, pictures and small decoders."""

from __future__ import annotations

from typing import Any

import torch

TOKENS = 8  # text tokens of every prompt


def embeds(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values that depend on shape and seed only: stand-ins for a text encoder's output."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(300 + seed))


def picture(*shape: int) -> torch.Tensor:
    """Values in [0, 1): an image [B, 3, H, W] or the frames of a video [F, 3, H, W]."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(77))


def photo(size: int) -> Any:
    """A picture as pipelines that measure its sides want it."""
    from PIL import Image

    pixels = (picture(size, size, 3) * 255).to(torch.uint8)
    return Image.fromarray(pixels.numpy())


def mask(tokens: int = TOKENS, used: int = TOKENS) -> torch.Tensor:
    """An attention mask [1, tokens] of which the first `used` are real."""
    return (torch.arange(tokens)[None] < used).long()


def flow(**config: Any) -> Any:
    """The flow-matching Euler scheduler that most families use."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


def kl(latent_channels: int = 4) -> Any:
    """An image autoencoder that keeps the size (one block, so no downsampling)."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=16,
        shift_factor=0.06,
        scaling_factor=1.5,
    )


def without(*names: str) -> dict[str, None]:
    """Components that a pipeline does without, because its call brings embeddings or returns latents."""
    return dict.fromkeys(names)
