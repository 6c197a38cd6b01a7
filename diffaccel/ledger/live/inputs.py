"""What each denoiser class is called with for a picture or a clip: empty tensors of the right shapes, one branch.

Shapes follow the pipelines of diffusers. `rows` and `columns` are latents' height and width, `frames` latent frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """Latents [channels, frames, rows, columns], text lengths by stream, where and of what dtype tensors are."""

    frames: int
    rows: int
    columns: int
    text: tuple[int, ...]
    audio: int = 0  # tokens
    dtype: torch.dtype = torch.bfloat16
    device: str = "meta"

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An empty tensor."""
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def time(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A timestep, [1]."""
        return self.new(1, dtype=dtype)


Kwargs = dict[str, Any]


def flux(config: Any, call: Call) -> Kwargs:
    tokens, text = call.rows * call.columns // 4, call.text[0]
    return {
        "hidden_states": call.new(1, tokens, config.in_channels),
        "encoder_hidden_states": call.new(1, text, config.joint_attention_dim),
        "pooled_projections": call.new(1, config.pooled_projection_dim),
        "timestep": call.time(),
        "img_ids": call.new(tokens, 3),
        "txt_ids": call.new(text, 3),
        "guidance": call.new(1, dtype=torch.float32) if config.guidance_embeds else None,
    }


def flux2(config: Any, call: Call) -> Kwargs:
    tokens, text = call.rows * call.columns // 4, call.text[0]
    return {
        "hidden_states": call.new(1, tokens, config.in_channels),
        "encoder_hidden_states": call.new(1, text, config.joint_attention_dim),
        "timestep": call.time(),
        "img_ids": call.new(1, tokens, 4, dtype=torch.int64),
        "txt_ids": call.new(1, text, 4, dtype=torch.int64),
        "guidance": call.new(1, dtype=torch.float32) if config.guidance_embeds else None,
    }


def sd3(config: Any, call: Call) -> Kwargs:
    return {
        "hidden_states": call.new(1, config.in_channels, call.rows, call.columns),
        "encoder_hidden_states": call.new(1, call.text[0], config.joint_attention_dim),
        "pooled_projections": call.new(1, config.pooled_projection_dim),
        "timestep": call.time(),
    }


def qwen(config: Any, call: Call) -> Kwargs:
    rows, columns = call.rows // 2, call.columns // 2
    return {
        "hidden_states": call.new(1, rows * columns, config.in_channels),
        "encoder_hidden_states": call.new(1, call.text[0], config.joint_attention_dim),
        "timestep": call.time(),
        "img_shapes": [[(1, rows, columns)]],
    }


def pixart(config: Any, call: Call) -> Kwargs:
    return {
        "hidden_states": call.new(1, config.in_channels, call.rows, call.columns),
        "encoder_hidden_states": call.new(1, call.text[0], config.caption_channels),
        "encoder_attention_mask": call.new(1, call.text[0]),
        "timestep": call.time(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def zimage(config: Any, call: Call) -> Kwargs:
    return {
        "x": [call.new(config.in_channels, 1, call.rows, call.columns)],
        "t": call.time(),
        "cap_feats": [call.new(call.text[0], config.cap_feat_dim)],
    }


def unet(config: Any, call: Call) -> Kwargs:
    added: Kwargs = {}
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"text_embeds": call.new(1, pooled), "time_ids": call.new(1, 6)}
    return {
        "sample": call.new(1, config.in_channels, call.rows, call.columns),
        "timestep": call.time(),
        "encoder_hidden_states": call.new(1, call.text[0], config.cross_attention_dim),
        "added_cond_kwargs": added,
    }


def wan(config: Any, call: Call) -> Kwargs:
    return {
        "hidden_states": call.new(1, config.in_channels, call.frames, call.rows, call.columns),
        "timestep": call.time(torch.int64),
        "encoder_hidden_states": call.new(1, call.text[0], config.text_dim),
    }


def hunyuan(config: Any, call: Call) -> Kwargs:
    return {
        "hidden_states": call.new(1, config.in_channels, call.frames, call.rows, call.columns),
        "timestep": call.time(),
        "encoder_hidden_states": call.new(1, call.text[0], config.text_embed_dim),
        "encoder_attention_mask": call.new(1, call.text[0], dtype=torch.int64),
        "pooled_projections": call.new(1, config.pooled_projection_dim),
        "guidance": call.new(1) if config.guidance_embeds else None,
    }


def hunyuan15(config: Any, call: Call) -> Kwargs:
    text, glyphs, image = call.text
    return {
        "hidden_states": call.new(1, config.in_channels, call.frames, call.rows, call.columns),
        "timestep": call.time(),
        "encoder_hidden_states": call.new(1, text, config.text_embed_dim),
        "encoder_attention_mask": call.new(1, text),
        "encoder_hidden_states_2": call.new(1, glyphs, config.text_embed_2_dim),
        "encoder_attention_mask_2": call.new(1, glyphs),
        "image_embeds": call.new(1, image, config.image_embed_dim),
    }


def cogvideox(config: Any, call: Call) -> Kwargs:
    patch = config.patch_size
    rotary = None
    if config.use_rotary_positional_embeddings:
        tokens = call.frames * (call.rows // patch) * (call.columns // patch)
        rotary = tuple(call.new(tokens, config.attention_head_dim, dtype=torch.float32) for _ in range(2))
    return {
        "hidden_states": call.new(1, call.frames, config.in_channels, call.rows, call.columns),
        "encoder_hidden_states": call.new(1, call.text[0], config.text_embed_dim),
        "timestep": call.time(torch.int64),
        "image_rotary_emb": rotary,
    }


def ltx(config: Any, call: Call) -> Kwargs:
    tokens = call.frames * call.rows * call.columns
    return {
        "hidden_states": call.new(1, tokens, config.in_channels),
        "encoder_hidden_states": call.new(1, call.text[0], config.caption_channels),
        "timestep": call.time(),
        "encoder_attention_mask": call.new(1, call.text[0]),
        "num_frames": call.frames,
        "height": call.rows,
        "width": call.columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def ltx2(config: Any, call: Call) -> Kwargs:
    tokens = call.frames * call.rows * call.columns
    return {
        "hidden_states": call.new(1, tokens, config.in_channels),
        "audio_hidden_states": call.new(1, call.audio, config.audio_in_channels),
        "encoder_hidden_states": call.new(1, call.text[0], config.caption_channels),
        "audio_encoder_hidden_states": call.new(1, call.text[0], config.caption_channels),
        "timestep": call.time(),
        "sigma": call.time(),
        "encoder_attention_mask": call.new(1, call.text[0]),
        "audio_encoder_attention_mask": call.new(1, call.text[0]),
        "num_frames": call.frames,
        "height": call.rows,
        "width": call.columns,
        "audio_num_frames": call.audio,
    }


def mochi(config: Any, call: Call) -> Kwargs:
    return {
        "hidden_states": call.new(1, config.in_channels, call.frames, call.rows, call.columns),
        "encoder_hidden_states": call.new(1, call.text[0], config.text_embed_dim),
        "timestep": call.time(),
        "encoder_attention_mask": call.new(1, call.text[0], dtype=torch.bool),
    }


INPUTS: dict[str, Callable[[Any, Call], Kwargs]] = {
    "CogVideoXTransformer3DModel": cogvideox,
    "Flux2Transformer2DModel": flux2,
    "FluxTransformer2DModel": flux,
    "HunyuanVideo15Transformer3DModel": hunyuan15,
    "HunyuanVideoTransformer3DModel": hunyuan,
    "LTX2VideoTransformer3DModel": ltx2,
    "LTXVideoTransformer3DModel": ltx,
    "MochiTransformer3DModel": mochi,
    "PixArtTransformer2DModel": pixart,
    "QwenImageTransformer2DModel": qwen,
    "SD3Transformer2DModel": sd3,
    "UNet2DConditionModel": unet,
    "WanTransformer3DModel": wan,
    "ZImageTransformer2DModel": zimage,
}
