"""What the two trainings need to know about a kind: shapes, batches, how to draw, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]  # (height, width), or (frames, height, width)


@dataclass(frozen=True)
class AutoencoderTask:
    """`draw(split, shape, seeds)` gives pixels [B, 3, ...] in -1..1 and what they show."""

    batches: tuple[tuple[Shape, int], ...]  # (shape, count), one per step, cycled
    draw: Callable[[str, Shape, range], tuple[torch.Tensor, list[Any]]]
    loss_of: Callable[[Any, torch.Tensor, torch.Generator], torch.Tensor]  # (vae, pixels, generator)
    set_scale: Callable[[Any], None]
    peak_rate: float = 2e-3
    hold: float = 0.4  # share of the time at the peak rate


@dataclass(frozen=True)
class DenoiserTask:
    """`loss_of(pipe, x0, captions, shape, high, generator)` is the velocity error of latents `x0` [B, ...]."""

    buckets: dict[Shape, tuple[float, float, int]]  # shape: (share early, share late, batch)
    modules: tuple[str, ...]  # names of the trained parts of the pipeline
    prepare: Callable[[Any, int], None]  # (pipe, seed): starting weights
    encode: Callable[[Any, Shape, range], tuple[torch.Tensor, list[Any]]]  # (pipe, shape, seeds): latents, scenes
    loss_of: Callable[[Any, torch.Tensor, list[str], Shape, float, torch.Generator], torch.Tensor]
    high_noise: tuple[float, float] = (0.8, 0.5)  # share of extra high noise, early and late
    peak_rate: float = 2e-3
    early: float = 0.87  # share of the time until `late` begins
    hold: float = 0.8  # share of the time at the peak rate
    empty: float = 0.1  # share of empty captions
    check_s: float = 600.0


@dataclass(frozen=True)
class Training:
    """One kind's whole training."""

    autoencoder: AutoencoderTask
    denoiser: DenoiserTask
    scenes: dict[Shape, int]  # how many scenes are encoded, for a budget of an hour or more
    vae_share: float  # of the time
    other_share: float = 0.03  # encoding the scenes once


def pack_seeds(first: int, count: int, chunk: int) -> list[range]:
    """Seeds first .. first + count - 1 in chunks."""
    return [range(first + at, first + min(at + chunk, count)) for at in range(0, count, chunk)]


_KL_WEIGHT = 5e-4
_LATENT_NOISE = 0.2  # largest, in standard deviations of the latents


def reconstruction_loss(vae: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Reconstruction and KL loss of pixels [B, 3, ...]; latents get noise, its strength per sample."""
    import torch

    posterior = vae.encode(x).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=generator)
    each = (len(x), *([1] * (x.ndim - 1)))
    strength = _LATENT_NOISE * torch.rand(each, generator=generator) * posterior.mean.detach().std()
    y = vae.decode(posterior.mean + (posterior.var + strength**2).sqrt() * noise).sample
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1.0 - posterior.logvar).mean()
    loss: torch.Tensor = (y - x).abs().mean() + 4.0 * (y - x).square().mean() + _KL_WEIGHT * kl
    return loss
