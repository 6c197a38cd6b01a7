"""Distances between two sets of pictures; pure functions of the pixels.

Pictures may be given as
  torch tensors   [C, H, W], [B, C, H, W] or, for video, [F, C, H, W], [B, F, C, H, W];
  numpy arrays    the same; both also with channels last: [H, W, C] to [B, F, H, W, C];
  PIL images      one, a list, or for video a list of lists of frames;
  files           the path of a picture, of a folder of frames, or of a video (see `files`);
  lists           of any of these that have one shape.
Values are in 0..1 (others are refused), and 8-bit ones (PIL, uint8, files) are divided by 255. The peak is therefore
always 1. Both
sides may be of different forms, but must show as many pictures of the same size, else `InvalidOptionError`. One
video may be given with or without the batch axis.

Each result is a plain float: the mean over all pictures, where every frame of a video counts as a picture.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import InvalidOptionError
from . import files

_ROUNDING = 4e-3  # of bfloat16 at 1, by which a decoder's answer may be outside
_SSIM_MIN_SIDE = 11  # the Gaussian window of SSIM


def as_batch(images: Any) -> torch.Tensor:
    """Any accepted form as floating point [B, C, H, W] or [B, F, C, H, W]; half precision becomes float32."""
    tensor = _stack(images)
    if tensor.ndim == 3:
        tensor = tensor[None]
    if tensor.ndim not in (4, 5) or tensor.numel() == 0:
        raise InvalidOptionError(
            f"cannot compare something of shape {list(tensor.shape)}: "
            "pictures are [C, H, W] or [B, C, H, W], videos [B, F, C, H, W], and neither may be empty"
        )
    return tensor


def pair(reference: Any, candidate: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides as float [N, C, H, W] on the reference's device, videos taken apart into frames."""
    ours, theirs = as_batch(reference), as_batch(candidate)
    if ours.ndim < theirs.ndim and len(theirs) == 1:
        ours = ours[None]  # one video, without and with the batch axis
    elif theirs.ndim < ours.ndim and len(ours) == 1:
        theirs = theirs[None]
    if ours.shape != theirs.shape:
        raise InvalidOptionError(
            f"the reference has shape {list(ours.shape)} but the candidate has {list(theirs.shape)}: "
            "both must show the same pictures at the same size"
        )
    _require_unit("reference", ours)
    _require_unit("candidate", theirs)
    dtype = torch.promote_types(ours.dtype, theirs.dtype)
    ours, theirs = ours.to(dtype), theirs.to(ours.device, dtype)
    return ours.flatten(0, -4), theirs.flatten(0, -4)


def _require_unit(side: str, pictures: torch.Tensor) -> None:
    """Refuse values outside of 0..1 (a rounding's worth is let through; NaN shows in the result)."""
    known = pictures[~pictures.isnan()]
    low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        hint = "from -1..1 by x / 2 + 0.5" if low < 0 and low >= -1.1 and high <= 1.1 else "and divide 0..255 by 255"
        raise InvalidOptionError(
            f"the {side} has values from {low:.4g} to {high:.4g}: pictures in floating point are in 0..1, so that the "
            f"peak is 1; bring them there first ({hint})"
        )


def mse(reference: Any, candidate: Any) -> float:
    """Mean squared error; 0 for identical pictures."""
    ours, theirs = pair(reference, candidate)
    return float(_squared_error(ours, theirs).mean())


def max_error(reference: Any, candidate: Any) -> float:
    """Largest absolute difference of any one value; 0 for identical pictures."""
    ours, theirs = pair(reference, candidate)
    return float((ours - theirs).abs().max())


def psnr(reference: Any, candidate: Any) -> float:
    """Peak signal-to-noise ratio in dB, 10 log10(1 / MSE) of each picture, averaged; inf if identical.

    In a mixed set the identical pictures are left out of the mean: one of them would make the whole set
    infinitely good. The result is inf only where every picture is identical.
    """
    ours, theirs = pair(reference, candidate)
    errors = _squared_error(ours, theirs)
    errors = errors[errors != 0]  # keeps NaN, which must show
    return float((-10.0 * errors.log10()).mean()) if len(errors) else float("inf")


def ssim(reference: Any, candidate: Any) -> float:
    """Structural similarity (Wang et al. 2004; Gaussian window of 11, sigma 1.5); 1 if identical."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    ours, theirs = pair(reference, candidate)
    if min(ours.shape[-2:]) < _SSIM_MIN_SIDE:
        raise InvalidOptionError(
            f"ssim needs pictures of at least {_SSIM_MIN_SIDE}x{_SSIM_MIN_SIDE} pixels, "
            f"got {ours.shape[-1]}x{ours.shape[-2]}; leave it out of metrics"
        )
    return float(structural_similarity_index_measure(theirs, ours, data_range=1.0))


def _squared_error(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each picture, [N]."""
    return (ours - theirs).square().flatten(1).mean(dim=1)


def _stack(images: Any) -> torch.Tensor:
    if isinstance(images, torch.Tensor):
        return _channels_first(_unit(images.detach()))
    if isinstance(images, np.ndarray):
        return _channels_first(_unit(_from_numpy(images)))
    if hasattr(images, "convert"):  # PIL
        return _unit(torch.from_numpy(files.pixels(images))).movedim(-1, -3)
    if isinstance(images, (str, os.PathLike)):
        return _unit(torch.from_numpy(files.read(images))).movedim(-1, -3)
    if isinstance(images, Sequence) and not isinstance(images, bytes) and len(images):
        parts = [_stack(image) for image in images]
        shapes = sorted({tuple(part.shape) for part in parts})
        if len(shapes) > 1:
            found = " and ".join(str(list(shape)) for shape in shapes)
            raise InvalidOptionError(f"the pictures of one list must have one shape, got {found}")
        return torch.stack(parts)
    what = "an empty list" if isinstance(images, Sequence) and not len(images) else type(images).__name__
    raise InvalidOptionError(
        f"cannot compare {what}: give torch tensors, numpy arrays, PIL images, paths or lists of these"
    )


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind not in "fiub":
        raise InvalidOptionError(f"cannot compare an array of dtype {array.dtype}: pixels are numbers")
    return torch.from_numpy(np.ascontiguousarray(array))


def _unit(tensor: torch.Tensor) -> torch.Tensor:
    """Pixels as float32 or float64; 8-bit ones scaled to 0..1."""
    if tensor.dtype == torch.uint8:
        return tensor.float() / 255.0
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    if tensor.is_complex():
        raise InvalidOptionError(f"cannot compare a tensor of dtype {tensor.dtype}: pixels are real numbers")
    return tensor.float()


def _channels_first(tensor: torch.Tensor) -> torch.Tensor:
    """[..., H, W, C] to [..., C, H, W] where the last axis, and not the third last, looks like channels."""
    channels = (1, 3, 4)
    if tensor.ndim >= 3 and tensor.shape[-1] in channels and tensor.shape[-3] not in channels:
        return tensor.movedim(-1, -3)
    return tensor
