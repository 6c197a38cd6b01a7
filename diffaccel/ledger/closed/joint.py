"""Denoisers whose image and text tokens attend to one another in one sequence."""

from __future__ import annotations

from .shape import Config, Latents, width_of
from .tally import ONE, Tally


def _rows(image: int, text: int) -> Tally:
    return Tally({"image": image, "text": text, "joint": image + text})


def _double(t: Tally, width: int, head: int, inner: int, times: int, *, bias: bool = True, gated: int = 1) -> None:
    """Attention over both streams with their own projections and MLPs; `gated` 2: a gate beside the value."""
    for stream in ("image", "text"):
        t.linear(stream, width, width, 4 * times, bias)
        t.linear(stream, width, gated * inner, times, bias)
        t.linear(stream, inner, width, times, bias)
    t.held(4 * head, times)
    t.attention("joint", "joint", width, times)


def _single(t: Tally, width: int, head: int, times: int) -> None:
    """Attention and MLP in parallel over one stream, put together by one projection (FLUX.1, HunyuanVideo)."""
    t.linear(ONE, width, 3 * width, times)
    t.linear("joint", width, width, 3 * times)
    t.linear("joint", width, 4 * width, times)
    t.linear("joint", 5 * width, width, times)
    t.held(2 * head, times)
    t.attention("joint", "joint", width, times)


def flux(c: Config, z: Latents) -> Tally:
    """FLUX.1; latents are packed 2 x 2."""
    d, head = width_of(c), c["attention_head_dim"]
    t = _rows(z.tokens(2), sum(z.text))
    t.embed(ONE, 256, d, 1 + bool(c.get("guidance_embeds")))
    t.embed(ONE, c["pooled_projection_dim"], d)
    t.linear("text", c["joint_attention_dim"], d)
    t.linear("image", c["in_channels"], d)
    t.linear(ONE, d, 6 * d, 2 * c["num_layers"])
    _double(t, d, head, 4 * d, c["num_layers"])
    _single(t, d, head, c["num_single_layers"])
    t.linear(ONE, d, 2 * d)
    t.linear("image", d, c["patch_size"] ** 2 * (c.get("out_channels") or c["in_channels"]))
    return t


def flux2(c: Config, z: Latents) -> Tally:
    """FLUX.2: modulation is shared by all blocks, and no layer has a bias."""
    d, head, inner = width_of(c), c["attention_head_dim"], int(c["mlp_ratio"] * width_of(c))
    t = _rows(z.tokens(2), sum(z.text))
    t.embed(ONE, c["timestep_guidance_channels"], d, 1 + bool(c.get("guidance_embeds", True)), bias=False)
    t.linear(ONE, d, 6 * d, 2, bias=False)
    t.linear(ONE, d, 3 * d, bias=False)
    t.linear("image", c["in_channels"], d, bias=False)
    t.linear("text", c["joint_attention_dim"], d, bias=False)
    _double(t, d, head, inner, c["num_layers"], bias=False, gated=2)
    single = c["num_single_layers"]
    t.linear("joint", d, 3 * d + 2 * inner, single, bias=False)
    t.linear("joint", d + inner, d, single, bias=False)
    t.held(2 * head, single)
    t.attention("joint", "joint", d, single)
    t.linear(ONE, d, 2 * d, bias=False)
    t.linear("image", d, c["patch_size"] ** 2 * (c.get("out_channels") or c["in_channels"]), bias=False)
    return t


def sd3(c: Config, z: Latents) -> Tally:
    """Stable Diffusion 3 and 3.5; the last block drops its text, and some of 3.5-medium attend to the image twice."""
    d, head, patch, layers = width_of(c), c["attention_head_dim"], c["patch_size"], c["num_layers"]
    normed = bool(c.get("qk_norm"))
    dual = len(c.get("dual_attention_layers") or ())
    t = _rows(z.tokens(patch), sum(z.text))
    t.conv(t.rows["image"], c["in_channels"], d, patch**2)
    t.embed(ONE, 256, d)
    t.embed(ONE, c["pooled_projection_dim"], d)
    t.linear("text", c["joint_attention_dim"], c["caption_projection_dim"])
    t.linear(ONE, d, 6 * d, 2 * layers - 1)
    t.linear(ONE, d, 3 * d, dual)
    t.linear(ONE, d, 2 * d, 2)  # text of the last block; output
    _double(t, d, head if normed else 0, 4 * d, layers - 1)
    t.linear("image", d, d, 4)
    t.linear("text", d, d, 3)
    t.mlp("image", d, 4 * d)
    t.held(4 * head * normed)
    t.attention("joint", "joint", d)
    t.linear("image", d, d, 4 * dual)
    t.held(2 * head * normed, dual)
    t.attention("image", "image", d, dual)
    t.linear("image", d, patch**2 * (c.get("out_channels") or c["in_channels"]))
    return t


def qwen(c: Config, z: Latents) -> Tally:
    """Qwen-Image; latents are packed 2 x 2, and text is not padded."""
    d, text = width_of(c), c["joint_attention_dim"]
    t = _rows(z.tokens(2), sum(z.text))
    t.embed(ONE, 256, d)
    t.held(text)
    t.linear("image", c["in_channels"], d)
    t.linear("text", text, d)
    t.linear(ONE, d, 6 * d, 2 * c["num_layers"])
    _double(t, d, c["attention_head_dim"], 4 * d, c["num_layers"])
    t.linear(ONE, d, 2 * d)
    t.linear("image", d, c["patch_size"] ** 2 * (c.get("out_channels") or c["in_channels"]))
    return t


def zimage(c: Config, z: Latents) -> Tally:
    """Z-Image: two refiner blocks for each stream, then one stream; both are padded to multiples of 32 tokens."""
    d, patch = c["dim"], c["all_patch_size"][0]
    head, inner, time = d // c["n_heads"], int(d / 3 * 8), min(d, 256)
    t = _rows(-(-z.tokens(patch) // 32) * 32, -(-sum(z.text) // 32) * 32)
    pixels = patch**2 * c["all_f_patch_size"][0] * c["in_channels"]
    t.linear("image", pixels, d)
    t.linear("joint", d, pixels)
    t.linear(ONE, time, d)
    refiners = c["n_refiner_layers"]
    for stream, blocks, modulated in (
        ("image", refiners, True),
        ("text", refiners, False),
        ("joint", c["n_layers"], True),
    ):
        t.linear(stream, d, d, 4 * blocks, bias=False)
        t.linear(stream, d, inner, 3 * blocks, bias=False)
        t.held(4 * d + 2 * head, blocks)
        t.linear(ONE, time, 4 * d, blocks * modulated)
        t.attention(stream, stream, d, blocks)
    t.linear(ONE, 256, 1024)
    t.linear(ONE, 1024, time)
    t.held(c["cap_feat_dim"])
    t.linear("text", c["cap_feat_dim"], d)
    t.held(2 * d)
    return t


def _refiner(t: Tally, stream: str, text: int, d: int, blocks: int) -> None:
    """HunyuanVideo's: text tokens attend to themselves before they meet the video."""
    t.embed(ONE, 256, d)
    t.embed(ONE, text, d)
    t.linear(stream, text, d)
    t.held(4 * d, blocks)
    t.linear(stream, d, d, 4 * blocks)
    t.mlp(stream, d, 4 * d, blocks)
    t.linear(ONE, d, 2 * d, blocks)
    t.attention(stream, stream, d, blocks)


def hunyuan(c: Config, z: Latents) -> Tally:
    """HunyuanVideo."""
    d, head, patch = width_of(c), c["attention_head_dim"], c["patch_size"]
    t = _rows(z.tokens(patch, c["patch_size_t"]), sum(z.text))
    t.conv(t.rows["image"], c["in_channels"], d, c["patch_size_t"] * patch**2)
    _refiner(t, "text", c["text_embed_dim"], d, c["num_refiner_layers"])
    t.embed(ONE, 256, d, 1 + bool(c.get("guidance_embeds")))
    t.embed(ONE, c["pooled_projection_dim"], d)
    t.linear(ONE, d, 6 * d, 2 * c["num_layers"])
    _double(t, d, head, int(c["mlp_ratio"] * d), c["num_layers"])
    _single(t, d, head, c["num_single_layers"])
    t.linear(ONE, d, 2 * d)
    t.linear("image", d, c["patch_size_t"] * patch**2 * c["out_channels"])
    return t


def hunyuan15(c: Config, z: Latents) -> Tally:
    """HunyuanVideo 1.5: text of a language model, glyphs and slots for an image, all padded into the sequence."""
    d, patch = width_of(c), c["patch_size"]
    words, glyphs, picture = z.text
    image = z.tokens(patch, c["patch_size_t"])
    t = _rows(image, sum(z.text))
    t.rows |= {"words": words, "glyphs": glyphs, "picture": picture}
    t.conv(image, c["in_channels"], d, c["patch_size_t"] * patch**2)
    _refiner(t, "words", c["text_embed_dim"], d, c["num_refiner_layers"])
    t.held(2 * c["text_embed_2_dim"])
    t.linear("glyphs", c["text_embed_2_dim"], 2048)
    t.linear("glyphs", 2048, 2048)
    t.linear("glyphs", 2048, d)
    t.held(2 * c["image_embed_dim"] + 2 * d)
    t.linear("picture", c["image_embed_dim"], c["image_embed_dim"])
    t.linear("picture", c["image_embed_dim"], d)
    t.held(3 * d)
    t.embed(ONE, 256, d, 1 + bool(c.get("use_meanflow")))
    t.linear(ONE, d, 6 * d, 2 * c["num_layers"])
    _double(t, d, c["attention_head_dim"], int(c["mlp_ratio"] * d), c["num_layers"])
    t.linear(ONE, d, 2 * d)
    t.linear("image", d, c["patch_size_t"] * patch**2 * c["out_channels"])
    return t


def cogvideox(c: Config, z: Latents) -> Tally:
    """CogVideoX 1.0 and 1.5: both streams share all weights; only their modulation differs."""
    d, patch, frames = width_of(c), c["patch_size"], c.get("patch_size_t")
    time, layers = c["time_embed_dim"], c["num_layers"]
    t = _rows(z.tokens(patch, frames or 1), sum(z.text))
    if frames:
        t.linear("image", c["in_channels"] * patch**2 * frames, d)
    else:
        t.conv(t.rows["image"], c["in_channels"], d, patch**2, bias=bool(c.get("patch_bias", True)))
    t.linear("text", c["text_embed_dim"], d)
    t.linear(ONE, d, time)
    t.linear(ONE, time, time)
    if c.get("ofs_embed_dim"):
        t.embed(ONE, c["ofs_embed_dim"], c["ofs_embed_dim"])
    t.linear(ONE, time, 6 * d, 2 * layers)
    t.held(4 * d + 4 * c["attention_head_dim"], layers)
    t.linear("joint", d, d, 4 * layers)
    t.mlp("joint", d, 4 * d, layers)
    t.attention("joint", "joint", d, layers)
    t.held(4 * d)
    t.linear(ONE, time, 2 * d)
    t.linear("image", d, patch**2 * (frames or 1) * c["out_channels"])
    return t


def mochi(c: Config, z: Latents) -> Tally:
    """Mochi: a narrower text stream, gated MLPs, a pooling attention over the text, no text behind the last block."""
    d, small, text, layers = width_of(c), c["pooled_projection_dim"], c["text_embed_dim"], c["num_layers"]
    patch = c["patch_size"]
    t = _rows(z.tokens(patch), sum(z.text))
    t.conv(t.rows["image"], c["in_channels"], d, patch**2)
    t.embed(ONE, c["time_embed_dim"], d)
    t.rows["pooled"] = sum(z.text) + 1  # their mean in front
    t.linear("pooled", text, 2 * text)
    t.linear(ONE, text, text)
    t.linear(ONE, text, d)
    t.attention(ONE, "pooled", text)
    t.linear("text", text, small)
    t.linear(ONE, d, 4 * d, layers)
    t.linear(ONE, d, 4 * small, layers - 1)
    t.linear(ONE, d, small)
    for stream, width, times in (("image", d, layers), ("text", small, layers - 1)):
        inner = 4 * width * 2 // 3
        t.linear(stream, width, 2 * inner, times, bias=False)
        t.linear(stream, inner, width, times, bias=False)
        t.linear(stream, d, width, times)
    t.linear("image", d, d, 3 * layers, bias=False)
    t.linear("text", small, d, 3 * layers, bias=False)
    t.held(4 * c["attention_head_dim"], layers)
    t.attention("joint", "joint", d, layers)
    t.linear(ONE, d, 2 * d)
    t.linear("image", d, patch**2 * (c.get("out_channels") or c["in_channels"]))
    t.held(3 * d // 2)
    return t
