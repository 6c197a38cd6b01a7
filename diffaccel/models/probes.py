"""Where families keep what step caches look at: modulated inputs, time embeddings, grids of tokens.

Functions that cards point to. They recompute next to nothing: a norm, or a time embedding.
"""

from __future__ import annotations

from typing import Any

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Grid = tuple[int, int, int]


def _given(name: str, position: int, args: Args, kwargs: Kwargs) -> Any:
    return kwargs[name] if name in kwargs else args[position]


# ---- the first block's input after its modulated norm, [B, T, C] ---------------------------------------------------


def norm1_emb(block: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """AdaLN-Zero: `norm1(hidden_states, emb=temb)` gives the modulated input first (FLUX, SD3, HunyuanVideo)."""
    hidden, temb = _given("hidden_states", 0, args, kwargs), _given("temb", 2, args, kwargs)
    if type(block.norm1).__name__.endswith("TokenReplace"):  # HunyuanVideo image-to-video
        modulated: torch.Tensor = block.norm1(hidden, temb, args[5], args[6])[0]
        return modulated
    modulated = block.norm1(hidden, emb=temb)[0]
    return modulated


def norm1_chroma(block: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """As `norm1_emb`; the first six modulations are the image's."""
    hidden, temb = _given("hidden_states", 0, args, kwargs), _given("temb", 2, args, kwargs)
    modulated: torch.Tensor = block.norm1(hidden, emb=temb[:, :6])[0]
    return modulated


def norm1_mochi(block: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Mochi's `norm1(hidden_states, temb)`."""
    hidden, temb = _given("hidden_states", 0, args, kwargs), _given("temb", 2, args, kwargs)
    modulated: torch.Tensor = block.norm1(hidden, temb)[0]
    return modulated


def norm1_table(block: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """LTX: shift and scale are the first two rows of a table plus the time embedding."""
    hidden, temb = _given("hidden_states", 0, args, kwargs), _given("temb", 2, args, kwargs)
    table = block.scale_shift_table
    values = table[None, None].to(temb.device) + temb.reshape(len(hidden), temb.shape[1], table.shape[0], -1)
    shift, scale = values[:, :, 0], values[:, :, 1]
    modulated: torch.Tensor = block.norm1(hidden) * (1 + scale) + shift
    return modulated


# ---- time embeddings of all steps, [N, ...] ------------------------------------------------------------------------


def time_wan(model: Any, timesteps: torch.Tensor, projected: bool) -> torch.Tensor:
    """[N, C], or [N, 6 C] behind the last projection."""
    embedder = model.condition_embedder
    features = embedder.timesteps_proj(timesteps)
    dtype = next(embedder.time_embedder.parameters()).dtype
    embedding: torch.Tensor = embedder.time_embedder(features.to(dtype))
    return embedder.time_proj(embedder.act_fn(embedding)) if projected else embedding


def time_cogvideox(model: Any, timesteps: torch.Tensor, projected: bool) -> torch.Tensor:
    """[N, C]."""
    dtype = next(model.time_embedding.parameters()).dtype
    embedding: torch.Tensor = model.time_embedding(model.time_proj(timesteps).to(dtype), None)
    return embedding


# ---- (frames, rows, columns) of the tokens a denoiser is given -----------------------------------------------------


def grid_of_ids(args: Args, kwargs: Kwargs) -> Grid | None:
    """From `img_ids` [N, 3 or 4] (place in time, row, column, ...); tokens of reference pictures have another time."""
    ids = kwargs.get("img_ids")
    if ids is None:
        return None
    ids = ids[0] if ids.ndim == 3 else ids
    first = ids[ids[:, 0] == ids[0, 0]]
    low, high = first.min(dim=0).values.tolist(), first.max(dim=0).values.tolist()
    return 1, int(high[1] - low[1]) + 1, int(high[2] - low[2]) + 1


def grid_of_shapes(args: Args, kwargs: Kwargs) -> Grid | None:
    """From `img_shapes`, [[(frames, rows, columns), shapes of reference pictures ...], ...] (Qwen-Image)."""
    shapes = kwargs.get("img_shapes")
    if not shapes:
        return None
    first = shapes[0][0] if isinstance(shapes[0], (list, tuple)) and not isinstance(shapes[0][0], int) else shapes[0]
    return int(first[0]), int(first[1]), int(first[2])


def grid_of_numbers(args: Args, kwargs: Kwargs) -> Grid | None:
    """From `num_frames`, `height` and `width`, in latents (LTX)."""
    values = [kwargs.get(name) for name in ("num_frames", "height", "width")]
    if any(value is None for value in values):
        return None
    frames, rows, columns = (int(value) for value in values if value is not None)
    return frames, rows, columns
