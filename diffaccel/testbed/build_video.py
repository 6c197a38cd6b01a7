"""The architecture of the video testbed: configs in, an ordinary WanPipeline out (untrained)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .build import t5_settings
from .tokenizers import umt5_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5EncoderModel

SPACE, TIME = 8, 4  # pixels and frames per latent


@dataclass(frozen=True)
class VideoSize:
    """Widths and depths; the defaults are the bundled model, tests may shrink them."""

    heads: int = 6
    head_dim: int = 32
    blocks: int = 6
    ffn_dim: int = 512
    freq_dim: int = 64
    text_dim: int = 64
    text_layers: int = 2
    latent_channels: int = 32
    vae_channels: int = 24


def vae(size: VideoSize) -> AutoencoderKLWan:
    """Causal autoencoder of Wan 2.2's kind: [B, 3, 1 + 4 n, H, W] in -1..1 to [B, channels, 1 + n, H/8, W/8]."""
    from diffusers import AutoencoderKLWan

    model = AutoencoderKLWan(
        base_dim=size.vae_channels,
        z_dim=size.latent_channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * size.latent_channels,
        latents_std=[1.0] * size.latent_channels,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=TIME,
        scale_factor_spatial=SPACE,
    )
    spread = model.quant_conv  # starts with a small variance, so that the mean is heard through the noise
    spread.weight.data[: size.latent_channels] *= 4.0
    spread.weight.data[size.latent_channels :] *= 0.1
    spread.bias.data[size.latent_channels :] = -5.0
    return model


def transformer(size: VideoSize) -> WanTransformer3DModel:
    """The denoiser: one token per latent, (1 + n) * H/8 * W/8 of them."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=size.heads,
        attention_head_dim=size.head_dim,
        in_channels=size.latent_channels,
        out_channels=size.latent_channels,
        text_dim=size.text_dim,
        freq_dim=size.freq_dim,
        ffn_dim=size.ffn_dim,
        num_layers=size.blocks,
        rope_max_seq_len=64,
    )


def text_encoder(size: VideoSize, tokenizer: Any) -> UMT5EncoderModel:
    """Gives the token embeddings [B, 32, text_dim]."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**t5_settings(size.text_dim, size.text_layers, tokenizer)))


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Flow matching with a fixed shift, stepped by Euler so that trajectories compare simply."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def pipeline(size: VideoSize | None = None, seed: int = 0) -> WanPipeline:
    """A WanPipeline with seeded random weights, no block inert; leaves the global generator alone."""
    import torch
    from diffusers import WanPipeline

    size = size or VideoSize()
    tokenizer = umt5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = WanPipeline(
            scheduler=scheduler(),
            vae=vae(size),
            text_encoder=text_encoder(size, tokenizer),
            tokenizer=tokenizer,
            transformer=transformer(size),
        )
    generator = torch.Generator().manual_seed(seed)
    for parameter in pipe.transformer.parameters():
        if parameter.ndim == 2:  # keeps activations at unit scale through every block
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    for module in (pipe.vae, pipe.transformer, pipe.text_encoder):
        module.requires_grad_(False).eval()
    return pipe
