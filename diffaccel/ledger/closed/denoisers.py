"""Which description belongs to which class of diffusers, and what a forward holds at its peak."""

from __future__ import annotations

from collections.abc import Callable

from . import cross, joint, unet
from .shape import Config, Latents, width_of
from .tally import Tally

BF16 = 2  # bytes

DENOISERS: dict[str, Callable[[Config, Latents], Tally]] = {
    "CogVideoXTransformer3DModel": joint.cogvideox,
    "Flux2Transformer2DModel": joint.flux2,
    "FluxTransformer2DModel": joint.flux,
    "HunyuanVideo15Transformer3DModel": joint.hunyuan15,
    "HunyuanVideoTransformer3DModel": joint.hunyuan,
    "LTX2VideoTransformer3DModel": cross.ltx2,
    "LTXVideoTransformer3DModel": cross.ltx,
    "MochiTransformer3DModel": joint.mochi,
    "PixArtTransformer2DModel": cross.pixart,
    "QwenImageTransformer2DModel": joint.qwen,
    "SD3Transformer2DModel": joint.sd3,
    "UNet2DConditionModel": unet.unet,
    "WanTransformer3DModel": cross.wan,
    "ZImageTransformer2DModel": joint.zimage,
}

# Values of one model width that are alive per token at the peak of an eager forward in bf16, without a matrix
# [tokens, tokens]: residual, norms, projections, MLP, rotary factors in fp32. Measured with PeakMemory on meta.
_PER_TOKEN: dict[str, float] = {
    "CogVideoXTransformer3DModel": 13.0,
    "Flux2Transformer2DModel": 21.7,
    "FluxTransformer2DModel": 17.3,
    "HunyuanVideo15Transformer3DModel": 17.0,
    "HunyuanVideoTransformer3DModel": 18.2,
    "LTX2VideoTransformer3DModel": 16.0,
    "LTXVideoTransformer3DModel": 15.8,
    "MochiTransformer3DModel": 17.6,
    "PixArtTransformer2DModel": 11.5,
    "QwenImageTransformer2DModel": 14.8,
    "SD3Transformer2DModel": 12.4,
    "ZImageTransformer2DModel": 15.9,
}
_WAN = (7.0, 1.5)  # per width of the model, per width of its MLP
_UNET = 15.8  # per latent place and width of the first level
_HUNYUAN15_MASK = 7.5  # beside two masks [tokens, tokens] of one byte, while they are made


def activation_bytes(name: str, c: Config, z: Latents, tokens: int) -> int:
    """Peak of one forward in bf16, batch 1, latents and text embeddings included. `tokens`: image and text."""
    if name == "UNet2DConditionModel":
        return int(BF16 * _UNET * z.rows * z.columns * c["block_out_channels"][0])
    width = c["dim"] if "dim" in c else width_of(c)
    if name == "WanTransformer3DModel":
        return int(BF16 * tokens * (_WAN[0] * width + _WAN[1] * c["ffn_dim"]))
    plain = int(BF16 * tokens * width * _PER_TOKEN[name])
    if name == "HunyuanVideo15Transformer3DModel":
        return max(2 * tokens**2 + int(BF16 * tokens * width * _HUNYUAN15_MASK), tokens**2 + plain)
    return plain
