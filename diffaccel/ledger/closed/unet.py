"""The UNet of Stable Diffusion 1, 2 and XL: residual blocks and transformers over levels of resolution."""

from __future__ import annotations

from typing import Any

from .shape import Config, Latents
from .tally import ONE, Tally


def _per_level(value: Any, levels: int) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * levels


def _residual(t: Tally, places: int, inner: int, outer: int, time: int) -> None:
    t.held(2 * inner + 2 * outer)
    t.conv(places, inner, outer, 9)
    t.linear(ONE, time, outer)
    t.conv(places, outer, outer, 9)
    if inner != outer:
        t.conv(places, inner, outer, 1)


def _transformer(t: Tally, places: int, width: int, text: int, depth: int, linear: bool) -> None:
    """`depth` blocks of self-attention, cross-attention and a gated MLP, between two projections."""
    stream = f"level {places}"
    t.rows[stream] = places
    t.held(2 * width)
    if linear:
        t.linear(stream, width, width, 2)
    else:
        t.conv(places, width, width, 1, 2)
    t.held(6 * width, depth)
    for keys, keys_width in ((stream, width), ("text", text)):
        t.linear(stream, width, width, depth, bias=False)
        t.linear(keys, keys_width, width, 2 * depth, bias=False)
        t.linear(stream, width, width, depth)
        t.attention(stream, keys, width, depth)
    t.linear(stream, width, 8 * width, depth)
    t.linear(stream, 4 * width, width, depth)


def unet(c: Config, z: Latents) -> Tally:
    """UNet2DConditionModel with the blocks that Stable Diffusion has."""
    widths, layers = list(c["block_out_channels"]), c["layers_per_block"]
    levels = len(widths)
    depths = _per_level(c.get("transformer_layers_per_block", 1), levels)
    attends = [name.startswith("CrossAttn") for name in c["down_block_types"]]
    text, linear, time = c["cross_attention_dim"], bool(c.get("use_linear_projection")), 4 * widths[0]
    places = [(z.rows >> level) * (z.columns >> level) for level in range(levels)]
    t = Tally({"text": sum(z.text), "image": places[attends.index(True)]})
    t.linear(ONE, widths[0], time)
    t.linear(ONE, time, time)
    if c.get("addition_embed_type") == "text_time":
        t.linear(ONE, c["projection_class_embeddings_input_dim"], time)
        t.linear(ONE, time, time)
    t.conv(places[0], c["in_channels"], widths[0], 9)
    skips, before = [widths[0]], widths[0]
    for level, width in enumerate(widths):
        for _ in range(layers):
            _residual(t, places[level], before, width, time)
            before = width
            if attends[level]:
                _transformer(t, places[level], width, text, depths[level], linear)
            skips.append(width)
        if level < levels - 1:
            t.conv(places[level + 1], width, width, 9)
            skips.append(width)
    for _ in range(2):
        _residual(t, places[-1], before, before, time)
    _transformer(t, places[-1], before, text, depths[-1], linear)
    for level in reversed(range(levels)):
        width = widths[level]
        for _ in range(layers + 1):
            _residual(t, places[level], before + skips.pop(), width, time)
            before = width
            if attends[level]:
                _transformer(t, places[level], width, text, depths[level], linear)
        if level:
            t.conv(places[level - 1], width, width, 9)
    t.held(2 * before)
    t.conv(places[0], before, c["out_channels"], 9)
    return t
