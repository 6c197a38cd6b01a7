"""Shared by the tests of exact strips: small autoencoders, latents, and a pipeline that holds an autoencoder."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from tests import tiny
from tests.tiny import redraw_zeros
from tests.vae import vaes

ITEM = "vae.tiling"
SEAM = {"_decode", "_encode"}  # attributes of a VAE while exact strips are on


@functools.cache
def vae(kind: str) -> Any:
    """Levels of unequal width, so that shortcuts and plain resnets both occur."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "flux2":
            made = vaes.flux2()
        else:
            wide = kind == "wide"
            made = diffusers.AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(16, 32, 64, 64) if wide else (8, 16, 16, 8),
                norm_num_groups=4,
                layers_per_block=2 if wide else 1,
                latent_channels=4,
                use_quant_conv=not wide,
                use_post_quant_conv=not wide,
            )
    redraw_zeros(made, torch.Generator().manual_seed(1))
    return made.eval()


def latents(height: int, width: int, batch: int = 1, channels: int = 4) -> torch.Tensor:
    """Noise whose contrast grows from left to right and from top to bottom: statistics differ from place to place."""
    z = torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(0))
    return z * torch.linspace(0.2, 2, width) * torch.linspace(0.5, 1.5, height)[:, None]


def plain_decode(model: Any, z: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model._decode(z).sample
    return made


def apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest error, of the range of the truth."""
    assert found.shape == truth.shape and found.dtype == truth.dtype
    return float((found - truth).abs().max() / (truth.max() - truth.min()))


@functools.cache
def vaes_in(dtype: torch.dtype) -> Any:
    return copy.deepcopy(vae("wide")).to(dtype)


def flux_with(model: Any) -> Any:
    pipe = tiny.build("flux")
    pipe.vae = model
    return pipe


def stats(pipe: Any) -> dict[str, Any]:
    found: dict[str, Any] = pipe.acceleration.report.stats[ITEM]
    return found


@torch.no_grad()
def by_hand(pipe: Any, z: torch.Tensor) -> torch.Tensor:
    """A decode within a run of the pipeline, without its loop."""
    with pipe.acceleration.run():
        made: torch.Tensor = pipe.vae.decode(z).sample
    return made
