"""Colour shift: how far the mean colour of a picture moved, in CIE L*a*b* (2.3 is about what an eye just sees)."""

from __future__ import annotations

from typing import Any

import torch

from .metrics import pair

# sRGB to CIE XYZ under D65 (IEC 61966-2-1), and the white point that normalises it
_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
_WHITE = (0.9505, 1.0, 1.089)


def colour_shift(reference: Any, candidate: Any) -> float:
    """Distance (CIE 1976) of the mean colours of two pictures, averaged over pictures; 0 if identical.

    An even tint is seen in full; differences that cancel over the picture are not.
    """
    ours, theirs = pair(reference, candidate)
    moved = lab(ours).mean(dim=(-2, -1)) - lab(theirs).mean(dim=(-2, -1))  # [N, 3]
    return float(moved.square().sum(dim=1).sqrt().mean())


def lab(pictures: torch.Tensor) -> torch.Tensor:
    """sRGB [N, C, H, W] in 0..1 to L*a*b* [N, 3, H, W]: L* in 0..100. Grey counts as equal parts, alpha not at all."""
    rgb = pictures[:, :1].expand(-1, 3, -1, -1) if pictures.shape[1] < 3 else pictures[:, :3]
    rgb = rgb.clamp(0, 1)
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = torch.einsum("ij,njhw->nihw", torch.tensor(_XYZ, dtype=rgb.dtype, device=rgb.device), linear)
    ratio = xyz / torch.tensor(_WHITE, dtype=rgb.dtype, device=rgb.device)[:, None, None]
    f = torch.where(ratio > (6 / 29) ** 3, ratio.clamp(min=1e-12) ** (1 / 3), ratio * (29 / 6) ** 2 / 3 + 4 / 29)
    x, y, z = f.unbind(1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), dim=1)
