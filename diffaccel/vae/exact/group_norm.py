"""Group normalisation of a map that is seen strip by strip, with the statistics of the whole map. Pure tensors.

Moments of strips are joined by the parallel formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise
algorithm for computing sample variances", 1979) in float64, so that a map cut into many strips loses nothing against
one pass.
"""

from __future__ import annotations

import torch

from ...ledger.hardware import widest


class Moments:
    """Count, mean and summed squared deviation of every group of a map [1, C, H, W], added up strip by strip."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.count = 0
        self.mean: torch.Tensor | None = None  # [groups], float64
        self.square: torch.Tensor | None = None  # [groups], float64: sum of squared deviations
        self._folded: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, strip: torch.Tensor) -> None:
        """Take in some rows [1, C, h, W], each row once."""
        channels, height, width = strip.shape[1:]
        grouped = strip.reshape(self.groups, channels // self.groups, height, width)
        wide = grouped if grouped.dtype in (torch.float32, torch.float64) else grouped.float()
        variance, mean = torch.var_mean(wide, dim=(1, 2, 3), correction=0)
        count = channels // self.groups * height * width
        precise = widest(strip.device)
        self._join(count, mean.to(precise), variance.to(precise) * count)

    def _join(self, count: int, mean: torch.Tensor, square: torch.Tensor) -> None:
        self._folded = None
        if self.mean is None or self.square is None:
            self.count, self.mean, self.square = count, mean, square
            return
        total = self.count + count
        apart = mean - self.mean
        self.square = self.square + square + apart * apart * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total

    def scale_and_shift(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, channels: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(a, b), each [1, C, 1, 1] in float32: the normalised map is x * a + b. Worked out once."""
        if self._folded is not None:
            return self._folded
        assert self.mean is not None and self.square is not None, "no strip was added"
        each = channels // self.groups
        mean = self.mean.repeat_interleave(each)
        scale = torch.rsqrt(self.square / self.count + eps).repeat_interleave(each)
        if weight is not None:
            scale = scale * weight
        shift = -mean * scale
        if bias is not None:
            shift = shift + bias
        self._folded = scale.float().view(1, -1, 1, 1), shift.float().view(1, -1, 1, 1)
        return self._folded


def apply(strip: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The normalised strip in `dtype`, computed in float32 and rounded once, as the layer itself does it."""
    if strip.dtype == torch.float32 and dtype == torch.float32:
        return torch.addcmul(shift, strip, scale)
    return strip.float().mul_(scale).add_(shift).to(dtype)
