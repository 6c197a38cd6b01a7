"""By what faults are told, as pure functions of pictures. Pictures are [N, F, C, H, W] in 0..1 (F = 1: no video)."""

from __future__ import annotations

import math

import torch

FLAT = 1 / 255  # spread below which a picture shows nothing
SHIFT = 0.02  # of the range, of one channel's mean
SHIFT_SHARE = 0.5  # part of the squared error that is the shift
LOWEST_DB = 25.0  # to the same run without the lever
FLICKER = 1.5  # times the flicker of that run
SEAM_FLOOR = 2 / 255  # jumps below this are seen by nobody
SEAM_SHARE = 0.5  # of the usual jump between two frames
SEAM_OVER = 3.0  # times the lower quartile of the jumps of the difference


def as_videos(pictures: torch.Tensor) -> torch.Tensor:
    """[N, C, H, W] or [N, F, C, H, W] as [N, F, C, H, W] in float32."""
    found = pictures.detach().float().cpu()
    return found[:, None] if found.ndim == 4 else found


def all_finite(pictures: torch.Tensor) -> bool:
    """No NaN, no infinity?"""
    return bool(torch.isfinite(pictures).all())


def is_flat(pictures: torch.Tensor) -> bool:
    """Is there no picture with anything to see in it (standard deviation over its pixels at most 1/255)?"""
    return bool((pictures.flatten(3).std(dim=-1).amax() <= FLAT).item())


def decibels(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """PSNR in dB over all pixels; inf where identical."""
    error = float((reference - candidate).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def colour_shift(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[float, float]:
    """(largest |difference of a channel's means|, share of the squared error that these differences are)."""
    difference = (candidate - reference).transpose(1, 2).flatten(2)  # [N, C, F * H * W]
    means, error = difference.mean(dim=-1), float(difference.square().mean())
    return float(means.abs().max()), float(means.square().mean()) / error if error else 0.0


def is_shifted(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Are the colours moved, rather than the picture another one?"""
    largest, share = colour_shift(reference, candidate)
    return largest > SHIFT and share > SHIFT_SHARE


def flicker(videos: torch.Tensor) -> float:
    """Mean absolute second difference along time: what a frame differs from the middle of its neighbours. 0 for a
    video at rest, in even motion of brightness, or of fewer than three frames."""
    if videos.shape[1] < 3:
        return 0.0
    return float((videos[:, 1:-1] - (videos[:, :-2] + videos[:, 2:]) / 2).abs().mean())


def jumps(videos: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of each frame to the one before: [F - 1], the mean over videos."""
    return (videos[:, 1:] - videos[:, :-1]).abs().flatten(2).mean(dim=-1).mean(dim=0)


def seams(whole: torch.Tensor, pieces: torch.Tensor) -> list[int]:
    """Frames at which a decode in pieces departs from the same latents decoded whole, from one frame to the next.

    A frame counts where the difference of both decodes jumps by half of the usual (median) jump of the video or more,
    and by three times what it jumps in its quieter quarter: rounding is everywhere, a seam begins at a frame.
    """
    if whole.shape[1] < 3:
        return []
    departs = jumps(pieces - whole)
    least = max(SEAM_FLOOR, SEAM_SHARE * float(jumps(whole).median()), SEAM_OVER * float(departs.quantile(0.25)))
    return [index + 1 for index, value in enumerate(departs.tolist()) if value > least]
