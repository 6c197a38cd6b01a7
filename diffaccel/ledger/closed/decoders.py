"""Autoencoders: FLOPs, parameters and peak memory of decoding, from a config alone.

Peaks are a factor times the largest feature map, plus what causal convolutions keep for the next frames, plus the
output that grows while frames are decoded one after another. The factors say how many such maps are alive at once in
eager diffusers (input, norm, activation, padded copy, result); they were measured with `PeakMemory` on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import log2
from typing import Any

from .maps import Decoding, Grid, Maps, larger, places
from .shape import Config, Latents
from .vae_encoders import encoder_parameters

FP32 = 4  # bytes


def _mirrored(c: Config, kernel: int, latent: int) -> int:
    """Parameters of the encoder that belongs to an AutoencoderKL's decoder."""
    m, widths, layers = Maps({}), list(c["block_out_channels"]), c["layers_per_block"]
    one: Grid = (1, 1, 1)
    m.layer(one, c.get("in_channels", 3), widths[0], kernel)
    before = widths[0]
    for level, width in enumerate(widths):
        for _ in range(layers):
            m.residual(one, before, width, kernel)
            before = width
        if level < len(widths) - 1:
            m.layer(one, width, width, kernel)
    _middle(m, one, before, kernel, bool(c.get("mid_block_add_attention", True)))
    m.held(2 * before)
    m.layer(one, before, 2 * latent, kernel)
    return m.parameters


def _middle(m: Maps, grid: Grid, width: int, kernel: int, attends: bool) -> None:
    for _ in range(2):
        m.residual(grid, width, width, kernel)
    if attends:
        m.attend(grid, width, 2, frame_by_frame=False, linear=True)


def _kl(c: Config, z: Latents) -> Decoding:
    """AutoencoderKL and FLUX.2's: a picture in one go."""
    widths = list(c.get("decoder_block_out_channels") or c["block_out_channels"])[::-1]
    latent, m, grid = c["latent_channels"], Maps({}), (1, z.rows, z.columns)
    m.layer(grid, latent, widths[0], 9)
    _middle(m, grid, widths[0], 9, bool(c.get("mid_block_add_attention", True)))
    before = widths[0]
    for level, width in enumerate(widths):
        for _ in range(c["layers_per_block"] + 1):
            m.residual(grid, before, width, 9)
            before = width
        if level < len(widths) - 1:
            grid = larger(grid)
            m.layer(grid, width, width, 9)
    m.held(2 * before)
    m.layer(grid, before, c.get("out_channels", 3), 9)
    decoder = m.parameters
    if c.get("use_post_quant_conv", True):
        m.layer((1, z.rows, z.columns), latent, latent, 1)
    if c.get("use_quant_conv", True):
        m.held(4 * latent**2 + 2 * latent)
    return Decoding(m.total, FP32 * 3 * m.largest, decoder, m.parameters + _mirrored(c, 9, latent))


# ---- Wan: one latent frame after the other, convolutions keep the last two frames they saw -------------------------


def _wan_frame(c: Config, z: Latents, first: bool) -> tuple[Maps, Grid]:
    """Maps of one latent frame; the first gives one frame, each further one four."""
    mult = list(c["dim_mult"])[::-1]
    residual, base = bool(c.get("is_residual")), c.get("decoder_base_dim") or c["base_dim"]
    widths = [base * factor for factor in [mult[0], *mult]]
    grows = list(c["temperal_downsample"])[::-1]
    m, grid = Maps({}), (1, z.rows, z.columns)

    def causal(inner: int, outer: int) -> None:
        m.layer(grid, inner, outer, 27)
        m.kept += 2 * inner * grid[1] * grid[2]

    def block(inner: int, outer: int) -> None:
        m.held(inner + outer)
        causal(inner, outer)
        causal(outer, outer)
        if inner != outer:
            m.layer(grid, inner, outer, 1)

    causal(c["z_dim"], widths[0])
    block(widths[0], widths[0])
    m.attend(grid, widths[0], 1, frame_by_frame=True)
    block(widths[0], widths[0])
    for level, (inner, width) in enumerate(pairwise(widths)):
        before = inner // 2 if level and not residual else inner
        for _ in range(c["num_res_blocks"] + 1):
            block(before, width)
            before = width
        if level == len(mult) - 1:
            break
        if grows[level]:
            m.conv(0 if first else places(grid), width, 2 * width, 3)
            m.kept += 2 * width * grid[1] * grid[2]
            grid = grid if first else (2 * grid[0], grid[1], grid[2])
        grid = larger(grid)
        m.layer(grid, width, width if residual else width // 2, 9)
    m.held(widths[-1])
    causal(widths[-1], c.get("out_channels") or c.get("input_channels", 3))
    return m, grid


def _wan_encoder(c: Config) -> int:
    widths = [c["base_dim"] * factor for factor in [1, *c["dim_mult"]]]
    m, one = Maps({}), (1, 1, 1)
    m.layer(one, c.get("in_channels") or c.get("input_channels", 3), widths[0], 27)
    last = len(widths) - 2
    for level, (before, width) in enumerate(pairwise(widths)):
        for index in range(c["num_res_blocks"]):
            m.residual(one, width if index else before, width, 27, norm=1)
        if level < last:
            m.layer(one, width, width, 9)
            if c["temperal_downsample"][level]:
                m.layer(one, width, width, 3)
    for _ in range(2):
        m.residual(one, widths[-1], widths[-1], 27, norm=1)
    m.attend(one, widths[-1], 1, frame_by_frame=True)
    m.held(widths[-1])
    m.layer(one, widths[-1], 2 * c["z_dim"], 27)
    return m.parameters


def _wan(c: Config, z: Latents) -> Decoding:
    """Wan 2.1 and 2.2 and Qwen-Image."""
    latent = c["z_dim"]
    first, grid = _wan_frame(c, z, True)
    flops, maps, frames = first.total, first, 1
    if z.frames > 1:
        later, grid = _wan_frame(c, z, False)
        flops += (z.frames - 1) * later.total
        maps, frames = later, 1 + (z.frames - 1) * grid[0]
    flops += 2 * z.tokens() * latent**2  # post_quant_conv
    made = (c.get("out_channels") or c.get("input_channels", 3)) * frames * grid[1] * grid[2]
    kind = "AutoencoderKLQwenImage" if z.frames == 1 else "residual" if c.get("is_residual") else "AutoencoderKLWan"
    factor = _PEAKS[kind]
    peak = FP32 * int(factor * maps.largest + (maps.kept if z.frames > 1 else 0) + made)
    quants = 5 * latent**2 + 3 * latent
    return Decoding(flops, peak, first.parameters, first.parameters + quants + _wan_encoder(c))


# ---- HunyuanVideo -------------------------------------------------------------------------------------------------

_HUNYUAN_TILE, _HUNYUAN_STRIDE = 16, 12  # frames: diffusers' defaults, which no config holds


def _hunyuan_chunk(c: Config, z: Latents, frames: int) -> Maps:
    widths, m, grid = list(c["block_out_channels"])[::-1], Maps({}), (frames, z.rows, z.columns)
    spatial, temporal = int(log2(c["spatial_compression_ratio"])), int(log2(c["temporal_compression_ratio"]))
    m.layer(grid, c["latent_channels"], widths[0], 27)
    _middle(m, grid, widths[0], 27, bool(c.get("mid_block_add_attention", True)))
    before, last = widths[0], len(widths) - 1
    for level, width in enumerate(widths):
        for _ in range(c["layers_per_block"] + 1):
            m.residual(grid, before, width, 27)
            before = width
        in_time = last > level >= last - temporal
        if level < spatial or in_time:
            if in_time:
                grid = (2 * grid[0] - 1, grid[1], grid[2])
            grid = larger(grid, 2 if level < spatial else 1)
            m.layer(grid, width, width, 27)
    m.held(2 * before)
    m.layer(grid, before, c.get("out_channels", 3), 27)
    return m


def _hunyuan(c: Config, z: Latents) -> Decoding:
    """HunyuanVideo: chunks of 16 frames that overlap by 4, blended; attention over a whole chunk in the middle."""
    ratio, latent = c["temporal_compression_ratio"], c["latent_channels"]
    tile, stride = _HUNYUAN_TILE // ratio, _HUNYUAN_STRIDE // ratio
    lengths = [z.frames]
    if z.frames > tile:
        lengths = [min(tile + 1, z.frames - start) for start in range(0, z.frames, stride)]
    chunks = [_hunyuan_chunk(c, z, length) for length in lengths]
    flops = sum(chunk.total for chunk in chunks)
    flops += sum(2 * length * z.rows * z.columns * latent**2 for length in lengths)
    made = 3 * (1 + ratio * (z.frames - 1)) * (z.rows * z.columns) * c["spatial_compression_ratio"] ** 2
    peak = FP32 * int(_PEAKS["AutoencoderKLHunyuanVideo"] * max(chunk.largest for chunk in chunks) + made)
    decoder = chunks[0].parameters
    quants = 5 * latent**2 + 3 * latent
    return Decoding(flops, peak, decoder, decoder + quants + _mirrored(c, 27, latent))


def _hunyuan15(c: Config, z: Latents) -> Decoding:
    """HunyuanVideo 1.5: the whole clip at once, with attention over all of it in the middle."""
    widths = list(c["block_out_channels"])[::-1]
    spatial, temporal = int(log2(c["spatial_compression_ratio"])), int(log2(c["temporal_compression_ratio"]))
    m, grid = Maps({}), (z.frames, z.rows, z.columns)
    m.layer(grid, c["latent_channels"], widths[0], 27)
    for _ in range(2):
        m.residual(grid, widths[0], widths[0], 27, norm=1)
    m.attend(grid, widths[0], 1, frame_by_frame=False)
    before = widths[0]
    for level, width in enumerate(widths):
        for _ in range(c["layers_per_block"] + 1):
            m.residual(grid, before, width, 27, norm=1)
            before = width
        if level < max(spatial, temporal):
            before = widths[level + 1] if c.get("upsample_match_channel", True) else width
            m.layer(grid, width, before * (8 if level < temporal else 4), 27)
            grid = larger((2 * grid[0] - 1, *grid[1:]) if level < temporal else grid)
            m.largest = max(m.largest, before * places(grid))
    m.held(before)
    m.layer(grid, before, c.get("out_channels", 3), 27)
    return _whole("AutoencoderKLHunyuanVideo15", c, m)


# ---- others -------------------------------------------------------------------------------------------------------


def _cogvideox_batch(c: Config, z: Latents, frames: int) -> Maps:
    widths, latent = list(c["block_out_channels"])[::-1], c["latent_channels"]
    m, grid = Maps({}), (frames, z.rows, z.columns)

    def norm(width: int) -> None:
        m.held(2 * width)
        m.layer(grid, latent, width, 1)
        m.layer(grid, latent, width, 1)

    def block(inner: int, outer: int) -> None:
        norm(inner)
        m.layer(grid, inner, outer, 27)
        norm(outer)
        m.layer(grid, outer, outer, 27)
        if inner != outer:
            m.layer(grid, inner, outer, 1)

    m.layer(grid, latent, widths[0], 27)
    block(widths[0], widths[0])
    block(widths[0], widths[0])
    before = widths[0]
    for level, width in enumerate(widths):
        for _ in range(c["layers_per_block"] + 1):
            block(before, width)
            before = width
        if level < len(widths) - 1:
            if level < int(log2(c["temporal_compression_ratio"])) and grid[0] > 1:
                grid = (2 * grid[0] - grid[0] % 2, grid[1], grid[2])
            grid = larger(grid)
            m.layer(grid, width, width, 9)
    norm(before)
    m.layer(grid, before, c.get("out_channels", 3), 27)
    return m


def _cogvideox(c: Config, z: Latents) -> Decoding:
    """CogVideoX: two latent frames at a time (three first, if their number is odd)."""
    batches = max(z.frames // 2, 1)
    lengths = [min(2, z.frames)] * batches
    lengths[0] += z.frames % 2 if z.frames > 1 else 0
    chunks = [_cogvideox_batch(c, z, length) for length in lengths]
    peak = FP32 * int(_PEAKS["AutoencoderKLCogVideoX"] * max(chunk.largest for chunk in chunks))
    decoder = chunks[0].parameters
    return Decoding(
        sum(k.total for k in chunks), peak, decoder, decoder + encoder_parameters("AutoencoderKLCogVideoX", c)
    )


def _ltx(c: Config, z: Latents, name: str) -> Decoding:
    """LTX-Video and LTX-2: the whole clip, upsampling by moving channels to places."""
    widths = list(c["decoder_block_out_channels"])[::-1]
    scales, layers = list(c["decoder_spatio_temporal_scaling"])[::-1], list(c["decoder_layers_per_block"])[::-1]
    factors = list(c.get("upsample_factor") or [1] * len(widths))[::-1]
    m, grid, before = Maps({}), (z.frames, z.rows, z.columns), widths[0]
    m.layer(grid, c["latent_channels"], before, 27)
    for _ in range(layers[0]):
        m.residual(grid, before, before, 27, norm=0)
    for width, scaled, depth, factor in zip(widths, scales, layers[1:], factors, strict=True):
        inner, before = before // factor, width // factor
        if inner != before:
            m.held(2 * inner)
            m.residual(grid, inner, before, 27, norm=0)
        if scaled:
            m.layer(grid, before * factor, before * 8, 27)
            grid = larger((2 * grid[0] - 1, *grid[1:]))
        for _ in range(depth):
            m.residual(grid, before, before, 27, norm=0)
    m.layer(grid, before, c.get("out_channels", 3) * c["patch_size"] ** 2, 27)
    return _whole(name, c, m)


def _mochi(c: Config, z: Latents) -> Decoding:
    """Mochi: the whole clip; projections widen the maps and are laid out in space and time."""
    widths, layers = list(c["decoder_block_out_channels"])[::-1], list(c["layers_per_block"])[::-1]
    m, grid = Maps({}), (z.frames, z.rows, z.columns)
    m.layer(grid, c["latent_channels"], widths[0], 1)
    for _ in range(layers[0]):
        m.residual(grid, widths[0], widths[0], 27)
    expansions = zip(c["temporal_expansions"][::-1], c["spatial_expansions"][::-1], strict=True)
    for level, (in_time, in_space) in enumerate(expansions):
        width, after = widths[level], widths[level + 1]
        for _ in range(layers[level + 1]):
            m.residual(grid, width, width, 27)
        m.rows["here"] = places(grid)
        m.linear("here", width, after * in_time * in_space**2)
        grid = (grid[0] * in_time, grid[1] * in_space, grid[2] * in_space)
        m.largest = max(m.largest, after * places(grid))
    for _ in range(layers[-1]):
        m.residual(grid, widths[-1], widths[-1], 27)
    m.rows["here"] = places(grid)
    m.linear("here", widths[-1], c.get("out_channels", 3))
    return _whole("AutoencoderKLMochi", c, m)


def _whole(name: str, c: Config, m: Maps) -> Decoding:
    parameters = m.parameters + encoder_parameters(name, c)
    return Decoding(m.total, FP32 * int(_PEAKS[name] * m.largest), m.parameters, parameters)


# Largest maps alive at once; measured, see the head of this file.
_PEAKS: dict[str, float] = {
    "AutoencoderKLCogVideoX": 9.9,
    "AutoencoderKLHunyuanVideo": 4.6,
    "AutoencoderKLHunyuanVideo15": 6.0,
    "AutoencoderKLLTX2Video": 5.3,
    "AutoencoderKLLTXVideo": 4.26,
    "AutoencoderKLMochi": 7.0,
    "AutoencoderKLQwenImage": 9.0,
    "AutoencoderKLWan": 3.3,
    "residual": 7.0,  # Wan 2.2's, whose blocks keep a copied shortcut
}

DECODERS: dict[str, Callable[[Mapping[str, Any], Latents], Decoding]] = {
    "AutoencoderKL": _kl,
    "AutoencoderKLCogVideoX": _cogvideox,
    "AutoencoderKLFlux2": _kl,
    "AutoencoderKLHunyuanVideo": _hunyuan,
    "AutoencoderKLHunyuanVideo15": _hunyuan15,
    "AutoencoderKLLTX2Video": lambda c, z: _ltx(c, z, "AutoencoderKLLTX2Video"),
    "AutoencoderKLLTXVideo": lambda c, z: _ltx(c, z, "AutoencoderKLLTXVideo"),
    "AutoencoderKLMochi": _mochi,
    "AutoencoderKLQwenImage": _wan,
    "AutoencoderKLWan": _wan,
}
