"""From the arguments of a denoiser call to the geometry of its tokens; the places are data of the model card."""

from __future__ import annotations

from typing import Any

import torch

from ..models.spec import ModelSpec
from .geometry import Geometry


def is_video(spec: ModelSpec) -> bool:
    """Do this family's self-attention layers see frames of tokens?"""
    return "frames" in spec.token_layout


def patch_sizes(config: Any) -> tuple[int, int, int]:
    """(frames, rows, columns) of latents in one token: `patch_size` as a triple, or with `patch_size_t` beside it."""
    size = getattr(config, "patch_size", 1)
    if isinstance(size, (list, tuple)):
        frames, rows, columns = size
        return frames, rows, columns
    return getattr(config, "patch_size_t", None) or 1, size, size


def geometry_of(
    spec: ModelSpec, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Geometry | None:
    """Frames, rows and columns of the tokens of one denoiser call, or None for what is no video.

    The number of text tokens is known at each attention call only; here `text` of 1 says that there can be some.
    """
    if not is_video(spec):
        return None
    if spec.grid is not None:
        grid = spec.grid(args, kwargs)
    else:
        main = kwargs[spec.input] if spec.input in kwargs else args[0] if args else None
        grid = _of_latents(spec.layout, main, patch_sizes(getattr(module, "config", None)))
    if grid is None:
        return None
    order = [word.strip() for word in spec.token_layout.split(",")]
    return Geometry(*grid, text=int("text" in order), text_first=order[0] == "text", frame_sink=spec.frame_sink)


def _of_latents(layout: str, x: Any, patch: tuple[int, int, int]) -> tuple[int, int, int] | None:
    if not isinstance(x, torch.Tensor) or x.ndim != 5 or layout not in ("BCFHW", "BFCHW"):
        return None
    frames = x.shape[2] if layout == "BCFHW" else x.shape[1]
    return frames // patch[0], x.shape[3] // patch[1], x.shape[4] // patch[2]
