"""Tiles along time decoded and joined where they belong, for classes whose own code joins them one frame late."""

from __future__ import annotations

from typing import Any

import torch


def decode_in_frame_tiles(
    vae: Any, z: torch.Tensor, temb: torch.Tensor | None = None, return_dict: bool = True, **more: Any
) -> Any:
    """What `vae._temporal_tiled_decode` returns, with every tile at its place.

    A tile is one latent frame longer than its size. The frame that its first latent makes is there already, as the
    last one that the tile before gave up, so it is dropped from every tile but the first; the classes concerned drop
    the last frame instead. Neighbours are blended over the frames that both have.

    Args:
        z: latents [B, C, T, h, w].
        temb: the decoder's time embedding.
        more: further arguments of the decoder (`causal`).
    """
    ratio = vae.temporal_compression_ratio
    size, step = vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames  # frames of the video
    height = vae.tile_sample_min_height // vae.spatial_compression_ratio
    width = vae.tile_sample_min_width // vae.spatial_compression_ratio
    count = (z.shape[2] - 1) * ratio + 1
    parts: list[torch.Tensor] = []
    before: torch.Tensor | None = None
    for first in range(0, z.shape[2], step // ratio):
        tile = z[:, :, first : first + size // ratio + 1]
        if first and tile.shape[2] == 1:
            break  # its one frame is there already
        if vae.use_tiling and (tile.shape[-1] > width or tile.shape[-2] > height):
            made = vae.tiled_decode(tile, temb, return_dict=True, **more).sample
        else:
            made = vae.decoder(tile, temb, **more)
        if before is None:
            parts.append(made[:, :, : step + 1])
        else:
            made = vae.blend_t(before, made[:, :, 1:], size - step)
            parts.append(made[:, :, :step])
        before = made
    video = torch.cat(parts, dim=2)[:, :, :count]
    if not return_dict:
        return (video,)
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=video)
