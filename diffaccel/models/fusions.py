"""Which linear layers of a block read the same input, and which read what comes out of a GELU; by family, as data.

4-bit kernels want both: layers with one input can be quantized as one, and activations after a GELU are never below
-0.17, so that they need no sign.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Joined:
    """A layer that reads two inputs put side by side, the last of them the GELU of `behind` (both in one block)."""

    layer: str
    behind: str


_JOINT = (("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"))

# Paths inside a block of layers that read the same tensor.
SHARED_INPUT: dict[str, tuple[tuple[str, ...], ...]] = {
    "chroma": _JOINT,
    "flux": _JOINT,
    "hunyuan_video": _JOINT,
    "qwen": _JOINT,
    "sd3": (*_JOINT, ("attn2.to_q", "attn2.to_k", "attn2.to_v")),
    "wan": (("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v")),
}

JOINED: dict[str, tuple[Joined, ...]] = {
    "chroma": (Joined("proj_out", "proj_mlp"),),
    "flux": (Joined("proj_out", "proj_mlp"),),
    "hunyuan_video": (Joined("proj_out", "proj_mlp"),),
}

# What diffusers' fuse_qkv_projections() puts into an attention module -> the layers that are then not called any more.
FUSED: dict[str, tuple[str, ...]] = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}

GELU_CLASSES = ("GELU",)  # first entries of a feed-forward's `net` whose third entry reads their output
