"""Pictures that are broken whatever they are compared with: not numbers, black, or of one colour."""

from __future__ import annotations

from typing import Any

import torch

from .metrics import as_batch

BLACK = 0.02  # brightest value below which a picture is black: 5 of 255
FLAT = 0.004  # standard deviation below which a picture is of one colour: 1 of 255


def faults(images: Any) -> list[str | None]:
    """Per picture or video "nan" (also infinite), "black", "flat", or None where nothing is wrong.

    A video has the fault of its first frame that has one.
    """
    tensor = as_batch(images)
    clips = tensor[:, None] if tensor.ndim == 4 else tensor  # [B, F, C, H, W]
    return [next((found for frame in clip if (found := _fault(frame)) is not None), None) for clip in clips]


def _fault(picture: torch.Tensor) -> str | None:
    if not bool(picture.isfinite().all()):
        return "nan"
    if float(picture.abs().max()) < BLACK:
        return "black"
    spread = picture.float().flatten(1).std(dim=1, correction=0)  # per channel: a tint is flat, too
    return "flat" if float(spread.max()) < FLAT else None
