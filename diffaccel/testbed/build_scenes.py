"""The architecture of the scenes testbed: configs in, an ordinary StableDiffusion3Pipeline out (untrained)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import build
from .tokenizers import SCENES_LENGTH, scenes_tokenizer

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

T5_LENGTH = 8  # tokens of the third text encoder, which is absent: SD3 puts zeros there


@dataclass(frozen=True)
class ScenesSize:
    """Widths and depths; the defaults are the bundled model, tests may shrink them."""

    heads: int = 4
    head_dim: int = 32
    blocks: int = 8
    text_dim: int = 64
    text_layers: int = 2
    latent_channels: int = 16
    vae_channels: tuple[int, int, int] = (16, 32, 48)


def transformer(size: ScenesSize) -> SD3Transformer2DModel:
    """The denoiser: latents [B, latent_channels, H/4, W/4] in patches of 2x2; places are known up to 128x128."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=size.latent_channels,
        out_channels=size.latent_channels,
        num_layers=size.blocks,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        joint_attention_dim=2 * size.text_dim,
        caption_projection_dim=size.heads * size.head_dim,
        pooled_projection_dim=2 * size.text_dim,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


def text_encoder(size: ScenesSize, tokenizer: Any) -> CLIPTextModelWithProjection:
    """Token embeddings [B, 24, text_dim] from the last layer but one, and the pooled one [B, text_dim]."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    settings = build.clip_settings(size.text_dim, size.text_layers, SCENES_LENGTH, tokenizer)
    return CLIPTextModelWithProjection(CLIPTextConfig(**settings))


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """SD3's: flow matching by Euler with shift 3; the rest is for `with_shift(pipe, "dynamic")`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        shift=3.0, base_shift=0.5, max_shift=1.15, base_image_seq_len=64, max_image_seq_len=256
    )


def pipeline(size: ScenesSize | None = None, seed: int = 0) -> StableDiffusion3Pipeline:
    """A StableDiffusion3Pipeline with seeded random weights, no block inert; no third text encoder."""
    import torch
    from diffusers import StableDiffusion3Pipeline

    size = size or ScenesSize()
    tokenizer = scenes_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = StableDiffusion3Pipeline(
            scheduler=scheduler(),
            vae=build.vae(size),
            text_encoder=text_encoder(size, tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=text_encoder(size, tokenizer),
            tokenizer_2=scenes_tokenizer(),
            text_encoder_3=None,
            tokenizer_3=None,
            transformer=transformer(size),
        )
    generator = torch.Generator().manual_seed(seed)
    for parameter in pipe.transformer.parameters():
        if parameter.ndim == 2:  # keeps activations at unit scale through every block
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        elif not parameter.data.any():
            parameter.data.normal_(0.0, 0.02, generator=generator)
    for module in (pipe.vae, pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        module.requires_grad_(False).eval()
    return pipe
