"""Denoisers whose image tokens attend to themselves, and then across to the text."""

from __future__ import annotations

from .shape import Config, Latents, width_of
from .tally import ONE, Tally

PICTURE_TOKENS = 257  # of CLIP ViT-H/14, which Wan 2.1 image-to-video is given


def _cross(t: Tally, stream: str, width: int, inner: int, keys: str, keys_width: int, times: int) -> None:
    """Queries and output of one stream, keys and values of another, `inner` wide inside."""
    t.linear(stream, width, inner, times)
    t.linear(keys, keys_width, inner, 2 * times)
    t.linear(stream, inner, width, times)
    t.attention(stream, keys, inner, times)


def pixart(c: Config, z: Latents) -> Tally:
    """PixArt-Alpha and -Sigma."""
    d, patch, layers = width_of(c), c["patch_size"], c["num_layers"]
    t = Tally({"image": z.tokens(patch), "text": sum(z.text)})
    t.conv(t.rows["image"], c["in_channels"], d, patch**2)
    t.embed(ONE, 256, d)
    if c.get("use_additional_conditions"):
        t.embed(ONE, 256, d // 3, 2)
    t.linear(ONE, d, 6 * d)
    t.embed("text", c["caption_channels"], d)
    _cross(t, "image", d, d, "image", d, layers)
    _cross(t, "image", d, d, "text", c["cross_attention_dim"], layers)
    t.mlp("image", d, 4 * d, layers)
    t.held(6 * d, layers)
    t.linear("image", d, patch**2 * c["out_channels"])
    t.held(2 * d)
    return t


def wan(c: Config, z: Latents) -> Tally:
    """Wan 2.1 and 2.2, with the picture's tokens of 2.1 image-to-video."""
    d, layers = width_of(c), c["num_layers"]
    frames, patch, _ = c["patch_size"]
    pictured = bool(c.get("added_kv_proj_dim"))
    t = Tally({"image": z.tokens(patch, frames), "text": sum(z.text), "picture": PICTURE_TOKENS * pictured})
    t.conv(t.rows["image"], c["in_channels"], d, frames * patch**2)
    t.embed(ONE, c["freq_dim"], d)
    t.linear(ONE, d, 6 * d)
    t.embed("text", c["text_dim"], d)
    if c.get("image_dim"):
        t.held(2 * c["image_dim"] + 2 * d)
        t.linear("picture", c["image_dim"], c["image_dim"])
        t.linear("picture", c["image_dim"], d)
    _cross(t, "image", d, d, "image", d, layers)
    _cross(t, "image", d, d, "text", d, layers)
    if pictured:
        t.linear("picture", c["added_kv_proj_dim"], d, 2 * layers)
        t.held(d, layers)
        t.attention("image", "picture", d, layers)
    t.held(4 * d + 2 * d * bool(c.get("cross_attn_norm")), layers)
    t.mlp("image", d, c["ffn_dim"], layers)
    t.held(6 * d, layers)
    t.linear("image", d, frames * patch**2 * c["out_channels"])
    t.held(2 * d)
    return t


def ltx(c: Config, z: Latents) -> Tally:
    """LTX-Video."""
    d, layers = width_of(c), c["num_layers"]
    t = Tally({"image": z.tokens(c["patch_size"], c["patch_size_t"]), "text": sum(z.text)})
    t.linear("image", c["in_channels"], d)
    t.embed(ONE, 256, d)
    t.linear(ONE, d, 6 * d)
    t.embed("text", c["caption_channels"], d)
    _cross(t, "image", d, d, "image", d, layers)
    _cross(t, "image", d, d, "text", c["cross_attention_dim"], layers)
    t.held(4 * d + 6 * d, layers)
    t.mlp("image", d, 4 * d, layers)
    t.linear("image", d, c["out_channels"])
    t.held(2 * d)
    return t


def ltx2(c: Config, z: Latents) -> Tally:
    """LTX-2: a stream of video and one of audio, each attending to itself, to the text and to the other."""
    d, layers = width_of(c), c["num_layers"]
    a = c["audio_num_attention_heads"] * c["audio_attention_head_dim"]
    t = Tally({"image": z.tokens(c["patch_size"], c["patch_size_t"]), "audio": z.audio, "text": sum(z.text)})
    streams = (
        ("image", d, c["in_channels"], c["out_channels"], c["cross_attention_dim"]),
        ("audio", a, c["audio_in_channels"], c["audio_out_channels"], c["audio_cross_attention_dim"]),
    )
    for stream, width, channels, outputs, text in streams:
        t.linear(stream, channels, width)
        t.linear(stream, width, outputs)
        t.embed("text", c["caption_channels"], width)
        t.embed(ONE, 256, width, 3)  # time; scales and shifts across modalities; their gate
        t.linear(ONE, width, (6 + 4 + 1) * width)
        _cross(t, stream, width, width, stream, width, layers)
        _cross(t, stream, width, width, "text", text, layers)
        t.mlp(stream, width, 4 * width, layers)
        t.held(4 * width + (6 + 5) * width, layers)
        t.held(2 * width)
    # both are as wide inside as the audio
    _cross(t, "image", d, a, "audio", a, layers)
    _cross(t, "audio", a, a, "image", d, layers)
    t.held(4 * a, layers)
    return t
