"""Tiny real autoencoders of diffusers with random weights; at most 2 million parameters each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
from diffusers.models import autoencoders

FOUR = (8, 8, 8, 8)
STATS: dict[str, Any] = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
WAN: dict[str, Any] = {
    "base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
    "temperal_downsample": [False, True, True], **STATS,
}  # fmt: skip
IMAGE: dict[str, Any] = {"block_out_channels": (32,) * 2, "layers_per_block": 1, "latent_channels": 4}


def kl(sample_size: int = 16) -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=sample_size,
    )


def flux2() -> Any:
    return autoencoders.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
        layers_per_block=1,
    )


def wan22() -> Any:
    return diffusers.AutoencoderKLWan(
        **WAN, decoder_base_dim=4, in_channels=12, out_channels=12, patch_size=2, is_residual=True,
        scale_factor_spatial=16,
    )  # fmt: skip


def hunyuan() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=FOUR,
        layers_per_block=1,
        norm_num_groups=4,
    )


def ltx() -> Any:
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=FOUR,
        decoder_block_out_channels=FOUR,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
    )


def cogvideox() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        block_out_channels=FOUR,
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=4,
        sample_height=80,  # tiles of 5 latents, overlap 1/6: as diffusers computes them, of the wrong size
        sample_width=96,
    )


def dc() -> Any:
    return diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        upsample_block_type="interpolate",
        downsample_block_type="conv",
    )


def tiny_kl() -> Any:
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=FOUR,
        decoder_block_out_channels=FOUR,
        num_encoder_blocks=(1,) * 4,
        num_decoder_blocks=(1,) * 4,
    )


# name -> (builder, whether its latents have frames)
SOUND: dict[str, tuple[Callable[[], Any], bool]] = {
    "kl": (kl, False),
    "flux2": (flux2, False),
    "wan": (lambda: diffusers.AutoencoderKLWan(**WAN), True),
    "wan22": (wan22, True),
    "qwen": (lambda: diffusers.AutoencoderKLQwenImage(**WAN), True),
    "hunyuan": (hunyuan, True),
    "ltx": (ltx, True),
    "cogvideox": (cogvideox, True),
    "dc": (dc, False),
    "tiny": (tiny_kl, False),
}


def hunyuan_image() -> Any:
    """Its tiled decoder raises."""
    return autoencoders.AutoencoderKLHunyuanImage(
        **IMAGE, in_channels=3, out_channels=3, spatial_compression_ratio=2, sample_size=16, scaling_factor=1.0
    )


def hunyuan_refiner() -> Any:
    """Its tiled decoder returns the wrong size (C54)."""
    return autoencoders.AutoencoderKLHunyuanImageRefiner(
        latent_channels=4,
        block_out_channels=(32,) * 3,
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=1,
    )


def asymmetric() -> Any:
    """Has no tiling."""
    return diffusers.AsymmetricAutoencoderKL(
        down_block_types=("DownEncoderBlock2D",),
        down_block_out_channels=(8,),
        up_block_types=("UpDecoderBlock2D",),
        up_block_out_channels=(8,),
        norm_num_groups=4,
    )
