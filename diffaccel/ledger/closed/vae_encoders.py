"""Parameters of the encoders of five video autoencoders; what a config leaves out is the class's default.

Encoders of AutoencoderKL, HunyuanVideo and Wan mirror their decoders and stand beside them in `decoders`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import log2, prod
from typing import Any

from .maps import Grid, Maps
from .shape import Config

ONE: Grid = (1, 1, 1)  # parameters do not depend on places
_STRIDES = {"spatial": (1, 2, 2), "temporal": (2, 1, 1), "spatiotemporal": (2, 2, 2)}


def _cogvideox(c: Config) -> int:
    widths, m = list(c["block_out_channels"]), Maps({})
    m.layer(ONE, c.get("in_channels", 3), widths[0], 27)
    before = widths[0]
    for level, width in enumerate(widths):
        for _ in range(c["layers_per_block"]):
            m.residual(ONE, before, width, 27)
            before = width
        if level < len(widths) - 1:
            m.layer(ONE, width, width, 9)
    for _ in range(2):
        m.residual(ONE, before, before, 27)
    m.held(2 * before)
    m.layer(ONE, before, 2 * c["latent_channels"], 27)
    made = c.get("out_channels", 3)  # of the picture: diffusers 0.42 sizes these two by it
    m.held((4 * made**2 + 2 * made) * bool(c.get("use_quant_conv")))
    m.held((made**2 + made) * bool(c.get("use_post_quant_conv")))
    return m.parameters


def _hunyuan15(c: Config) -> int:
    widths, m = list(c["block_out_channels"]), Maps({})
    spatial = log2(c["spatial_compression_ratio"])
    temporal = log2(c["spatial_compression_ratio"] // c["temporal_compression_ratio"])
    m.layer(ONE, c.get("in_channels", 3), widths[0], 27)
    before = widths[0]
    for level, width in enumerate(widths):
        for _ in range(c["layers_per_block"]):
            m.residual(ONE, before, width, 27, norm=1)
            before = width
        if level < spatial:
            before = widths[level + 1] if c.get("downsample_match_channel", True) else width
            m.layer(ONE, width, before // (8 if level >= temporal else 4), 27)
    last = widths[-1]
    for _ in range(2):
        m.residual(ONE, last, last, 27, norm=1)
    m.attend(ONE, last, 1, frame_by_frame=False)
    m.held(last)
    m.layer(ONE, last, 2 * c["latent_channels"], 27)
    return m.parameters


def _downsample(m: Maps, kind: str, inner: int, outer: int) -> None:
    m.layer(ONE, inner, inner if kind == "conv" else outer // prod(_STRIDES[kind]), 27)


def _ltx(c: Config) -> int:
    widths, layers, m = list(c["block_out_channels"]), list(c["layers_per_block"]), Maps({})
    kinds = list(c.get("down_block_types") or ["LTXVideoDownBlock3D"] * len(widths))
    scales = c.get("spatio_temporal_scaling") or (True, True, True, False)
    downs = c.get("downsample_type") or ("conv",) * len(widths)
    newer = kinds[-1] == "LTXVideo095DownBlock3D"
    after = widths[1:] if newer else [*widths[1:], widths[-1]]
    m.layer(ONE, c.get("in_channels", 3) * c["patch_size"] ** 2, widths[0], 27)
    before = widths[0]
    for level, width in enumerate(after):
        for _ in range(layers[level]):
            m.residual(ONE, before, before, 27, norm=0)
        if scales[level]:
            _downsample(m, downs[level] if newer else "conv", before, width)
        if not newer and before != width:
            m.held(2 * before)
            m.residual(ONE, before, width, 27, norm=0)
        before = width
    return _ltx_end(c, m, before, layers[-1])


def _ltx2(c: Config) -> int:
    widths, layers, m = list(c["block_out_channels"]), list(c["layers_per_block"]), Maps({})
    scales = c.get("spatio_temporal_scaling") or (True,) * len(widths)
    downs = c.get("downsample_type") or ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
    before = c["latent_channels"]
    m.layer(ONE, c.get("in_channels", 3) * c["patch_size"] ** 2, before, 27)
    for level, width in enumerate(widths):
        for _ in range(layers[level]):
            m.residual(ONE, before, before, 27, norm=0)
        if scales[level]:
            _downsample(m, downs[level], before, width)
        before = width
    return _ltx_end(c, m, before, layers[-1])


def _ltx_end(c: Config, m: Maps, width: int, depth: int) -> int:
    for _ in range(depth):
        m.residual(ONE, width, width, 27, norm=0)
    m.layer(ONE, width, c["latent_channels"] + 1, 27)
    return m.parameters


def _mochi(c: Config) -> int:
    widths = list(c.get("encoder_block_out_channels") or (64, 128, 256, 384))
    layers, m = list(c["layers_per_block"]), Maps({})
    attends = c.get("add_attention_block") or (False, True, True, True, True)

    def blocks(index: int, width: int) -> None:
        for _ in range(layers[index]):
            m.residual(ONE, width, width, 27)
            m.held((2 * width + 4 * width**2 + width) * bool(attends[index]))

    m.held(c.get("in_channels", 15) * widths[0] + widths[0])
    blocks(0, widths[0])
    expansions = zip(c["temporal_expansions"], c["spatial_expansions"], strict=True)
    for level, ((before, width), (in_time, in_space)) in enumerate(zip(pairwise(widths), expansions, strict=True)):
        m.layer(ONE, before, width, in_time * in_space**2)
        blocks(level + 1, width)
    blocks(-1, widths[-1])
    m.held(2 * widths[-1] + widths[-1] * 2 * c["latent_channels"])
    return m.parameters


_ENCODERS = {
    "AutoencoderKLCogVideoX": _cogvideox,
    "AutoencoderKLHunyuanVideo15": _hunyuan15,
    "AutoencoderKLLTX2Video": _ltx2,
    "AutoencoderKLLTXVideo": _ltx,
    "AutoencoderKLMochi": _mochi,
}


def encoder_parameters(kind: str, config: Mapping[str, Any]) -> int:
    """Parameters of the autoencoder beside its decoder."""
    return _ENCODERS[kind](config)
