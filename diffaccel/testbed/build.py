"""The architecture of the image testbed: configs in, an ordinary FluxPipeline out (untrained)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .tokenizers import TEXT_LENGTH, clip_tokenizer, t5_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel, T5EncoderModel

    from .build_scenes import ScenesSize


@dataclass(frozen=True)
class Size:
    """Widths and depths; the defaults are the bundled model, tests may shrink them."""

    heads: int = 5
    head_dim: int = 32
    rope_axes: tuple[int, int, int] = (8, 12, 12)
    double_blocks: int = 2
    single_blocks: int = 6
    text_dim: int = 64
    text_layers: int = 2
    latent_channels: int = 8
    vae_channels: tuple[int, int, int] = (16, 32, 32)


def vae(size: Size | ScenesSize) -> AutoencoderKL:
    """Convolutional autoencoder, 4x down: [B, 3, H, W] in -1..1 to [B, latent_channels, H/4, W/4]."""
    from diffusers import AutoencoderKL

    levels = len(size.vae_channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=size.vae_channels,
        layers_per_block=1,
        latent_channels=size.latent_channels,
        norm_num_groups=8,
        sample_size=64,
        scaling_factor=1.0,
        shift_factor=0.0,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def transformer(size: Size) -> FluxTransformer2DModel:
    """The denoiser: packed latents [B, H/8 * W/8, 4 * latent_channels]."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * size.latent_channels,
        num_layers=size.double_blocks,
        num_single_layers=size.single_blocks,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        joint_attention_dim=size.text_dim,
        pooled_projection_dim=size.text_dim,
        guidance_embeds=True,
        axes_dims_rope=size.rope_axes,
    )


def clip_settings(dim: int, layers: int, length: int, tokenizer: Any) -> dict[str, Any]:
    """Of a small CLIP text encoder of width `dim` for prompts of `length` tokens."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": dim,
        "intermediate_size": 4 * dim,
        "projection_dim": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": dim // 32,
        "max_position_embeddings": length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def clip_encoder(size: Size, tokenizer: Any) -> CLIPTextModel:
    """Gives the pooled prompt embedding [B, text_dim]."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(**clip_settings(size.text_dim, size.text_layers, TEXT_LENGTH, tokenizer)))


def t5_settings(dim: int, layers: int, tokenizer: Any) -> dict[str, Any]:
    """Of a small T5 (or UMT5) encoder of width `dim`."""
    return {
        "vocab_size": len(tokenizer),
        "d_model": dim,
        "d_kv": 32,
        "d_ff": 2 * dim,
        "num_layers": layers,
        "num_heads": dim // 32,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def t5_encoder(size: Size, tokenizer: Any) -> T5EncoderModel:
    """Gives the token embeddings [B, 32, text_dim]."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**t5_settings(size.text_dim, size.text_layers, tokenizer)))


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.1-dev's scheduler with the sequence lengths of this world (64 tokens at 64x64, 256 at 128x128)."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=64,
        max_image_seq_len=256,
    )


def pipeline(size: Size | None = None, seed: int = 0) -> FluxPipeline:
    """A FluxPipeline with seeded random weights, no block inert; leaves the global generator alone."""
    import torch
    from diffusers import FluxPipeline

    size = size or Size()
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = FluxPipeline(
            scheduler=scheduler(),
            vae=vae(size),
            text_encoder=clip_encoder(size, tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=t5_encoder(size, tokenizer_2),
            tokenizer_2=tokenizer_2,
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
