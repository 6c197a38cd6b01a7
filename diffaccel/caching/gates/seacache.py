"""SeaCache's gate: accumulated change of what a linear denoiser would keep of the gate tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...core.options import GOT, NUMBER, take
from ...errors import InvalidOptionError
from ...ledger.hardware import widest
from ..step import Step
from .base import GRID, SumGate


def sea_gain(
    shape: tuple[int, int, int], sigma: float, power: float = 3.0, device: torch.device | str | None = None
) -> torch.Tensor:
    """Response of the spectral filter at noise level sigma on a grid [T, H, W], mean 1, float64 (on mps float32).

    Per axis the optimal linear denoiser for a signal of power S(f) = |f|^-power under x = (1-sigma) s + sigma n:
    G(f) = a S / (a^2 S + b^2) = a / (a^2 + b^2 |f|^power), a = 1 - sigma, b = sigma; the product over axes is divided
    by its mean (as in diffusers). Source: SeaCache (arXiv 2602.18993); power 3 for video there, 2 is usual for
    images.
    """
    sigma = min(max(float(sigma), 1e-6), 1 - 1e-6)  # at 1 only the mean is left, and the formula says 0/0 for it
    a, b = 1 - sigma, sigma
    gain = torch.ones(shape, dtype=widest(torch.device(device or "cpu")), device=device)
    for axis, size in enumerate(shape):
        frequency = torch.fft.fftfreq(size, dtype=gain.dtype, device=device).abs()
        response = a / (a * a + b * b * frequency**power)
        gain = gain * response.reshape([size if i == axis else 1 for i in range(3)])
    return gain / gain.mean()


def sea_filter(x: torch.Tensor, sigma: float, power: float = 3.0) -> torch.Tensor:
    """x [..., T, H, W, C], filtered over its grid by `sea_gain`; same shape, at least float32."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    axes = (-4, -3, -2)
    t, h, w, _ = x.shape[-4:]
    gain = sea_gain((t, h, w), sigma, power, x.device).to(wide.dtype)
    filtered: torch.Tensor = torch.fft.ifftn(torch.fft.fftn(wide, dim=axes) * gain[..., None], dim=axes).real
    return filtered


@dataclass(frozen=True)
class SpectralGate(SumGate):
    """SeaCache: a <- a + |f_t - f_{t-1}| / |f_{t-1}| of the filtered gate tensor f, hit iff a < threshold.

    First and last steps and the cap on reused steps are guards; the residual's extrapolation is a predictor.
    Source: SeaCache (arXiv 2602.18993) for the filter; accumulated as in TeaCache.

    Attributes:
        threshold: budget of accumulated change (0.25 in diffusers for video, 0.15 to 0.3 for FLUX); 0: never.
        power: exponent of the signal's spectrum.
    """

    power: float = 3.0
    observes: ClassVar[str] = GRID
    reads_schedule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        take(self, NUMBER, "power", form=GOT)

    def unfit(self, sigmas: Sequence[float]) -> str | None:
        """The filter is that of flow matching, x = (1 - sigma) s + sigma n."""
        if not sigmas or max(sigmas) > 1:
            return "SeaCache needs noise levels of flow matching, between 0 and 1, and this scheduler has others"
        return None

    def feature(self, seen: torch.Tensor, step: Step) -> torch.Tensor:
        """The filtered grid, [..., T, H, W, C]."""
        if step.sigma is None:
            raise InvalidOptionError("SeaCache needs noise levels, and this scheduler gives none: use another gate")
        return sea_filter(seen, step.sigma, self.power)
