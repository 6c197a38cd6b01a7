"""Steadiness of videos in time: whether what changes between frames changes as in the reference, and flicker.

Videos are [F, C, H, W] or [B, F, C, H, W] in any form of `quality.metrics`; four axes are one video here.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidOptionError
from .metrics import as_batch, pair

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def motion_psnr(reference: Any, candidate: Any) -> float:
    """PSNR in dB (peak 1) of what changes from frame to frame, averaged over videos; inf if identical.

    An error that stands still costs nothing here and one that jumps costs twice: it tells flicker from a shift.
    """
    ours, theirs = clips(reference, 2, "motion_psnr"), clips(candidate, 2, "motion_psnr")
    pair(ours, theirs)  # refuses what cannot be compared
    errors = (ours.diff(dim=1) - theirs.to(ours).diff(dim=1)).square().flatten(1).mean(dim=1)
    errors = errors[errors != 0]  # as psnr: identical videos are left out of a mixed set
    return float((-10.0 * errors.log10()).mean()) if len(errors) else float("inf")


def flicker(videos: Any) -> float:
    """Mean |x[t-1] - 2 x[t] + x[t+1]| / 2 of brightness, per pixel and over videos, in 0..1.

    0 for a still and for what brightens evenly; a when every pixel jumps by a and back from frame to frame.
    """
    shown = clips(videos, 3, "flicker")
    return float(_luma(shown).diff(n=2, dim=1).abs().mean() / 2)


def flicker_rise(reference: Any, candidate: Any) -> float:
    """The candidate's flicker less the reference's: above 0 where acceleration made it flicker."""
    return flicker(candidate) - flicker(reference)


def clips(videos: Any, least: int, what: str) -> torch.Tensor:
    """Videos as floating point [B, F, C, H, W]. Raises InvalidOptionError below `least` frames."""
    tensor = as_batch(videos)
    tensor = tensor[None] if tensor.ndim == 4 else tensor
    if tensor.shape[1] < least:
        raise InvalidOptionError(
            f"{what} needs videos of at least {least} frames, got {tensor.shape[1]}; leave it out of metrics"
        )
    return tensor


def _luma(videos: torch.Tensor) -> torch.Tensor:
    """[B, F, C, H, W] to brightness [B, F, H, W]; grey stays as it is."""
    if videos.shape[2] < 3:
        return videos[:, :, 0]
    weights = torch.tensor(LUMA, dtype=videos.dtype, device=videos.device)
    return (videos[:, :, :3] * weights[:, None, None]).sum(dim=2)
