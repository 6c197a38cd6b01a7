"""Text encoders: parameters and FLOPs of one prompt, from a transformers config. Attention is counted dense."""

from __future__ import annotations

from collections.abc import Callable

from .shape import Config
from .tally import ONE, Tally


def clip(c: Config, tokens: int, projected: bool) -> Tally:
    """CLIP's text model; `projected`: with the projection of the pooled token."""
    d, layers = c["hidden_size"], c["num_hidden_layers"]
    t = Tally({"text": tokens})
    t.held((c["vocab_size"] + c["max_position_embeddings"]) * d)
    t.linear("text", d, d, 4 * layers)
    t.mlp("text", d, c["intermediate_size"], layers)
    t.attention("text", "text", d, layers)
    t.held(4 * d * layers + 2 * d)
    if projected:
        t.linear(ONE, d, c["projection_dim"], bias=False)
    return t


def t5(c: Config, tokens: int, own_distances: bool) -> Tally:
    """T5's encoder; `own_distances`: every layer has its table of relative distances (UMT5), not the first alone."""
    d, layers, inner = c["d_model"], c["num_layers"], c["num_heads"] * c["d_kv"]
    gated = str(c.get("feed_forward_proj", "relu")).startswith("gated")
    t = Tally({"text": tokens})
    t.held(c["vocab_size"] * d)
    t.linear("text", d, inner, 3 * layers, bias=False)
    t.linear("text", inner, d, layers, bias=False)
    t.linear("text", d, c["d_ff"], (1 + gated) * layers, bias=False)
    t.linear("text", c["d_ff"], d, layers, bias=False)
    t.attention("text", "text", inner, layers)
    t.held(c.get("relative_attention_num_buckets", 32) * c["num_heads"], layers if own_distances else 1)
    t.held(2 * d * layers + d)
    return t


def language_model(c: Config, tokens: int, *, biased: bool, head_norms: bool, norms: int = 2) -> Tally:
    """A decoder without its head: grouped attention, gated MLP; all layers run, whichever the pipeline reads."""
    d, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    head = c.get("head_dim") or d // heads
    keys = head * (c.get("num_key_value_heads") or heads)
    t = Tally({"text": tokens})
    t.held(c["vocab_size"] * d)
    t.linear("text", d, heads * head, layers, bias=biased)
    t.linear("text", d, keys, 2 * layers, bias=biased)
    t.linear("text", heads * head, d, layers, bias=False)
    t.linear("text", d, c["intermediate_size"], 2 * layers, bias=False)
    t.linear("text", c["intermediate_size"], d, layers, bias=False)
    t.attention("text", "text", heads * head, layers)
    t.held(norms * d + 2 * head * head_norms, layers)
    t.held(d)
    return t


def _plain(c: Config, tokens: int) -> Tally:
    return language_model(c, tokens, biased=bool(c.get("attention_bias")), head_norms=False)


def _qwen2(c: Config, tokens: int) -> Tally:
    return language_model(c, tokens, biased=True, head_norms=False)


def _qwen3(c: Config, tokens: int) -> Tally:
    return language_model(c, tokens, biased=bool(c.get("attention_bias")), head_norms=True)


def _gemma3(c: Config, tokens: int) -> Tally:
    return language_model(c, tokens, biased=False, head_norms=True, norms=4)


# By class; a class for text and pictures counts as its language model, which alone reads a prompt.
ENCODERS: dict[str, Callable[[Config, int], Tally]] = {
    "CLIPTextModel": lambda c, n: clip(c, n, False),
    "CLIPTextModelWithProjection": lambda c, n: clip(c, n, True),
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma3TextModel": _gemma3,
    "LlamaForCausalLM": _plain,
    "LlamaModel": _plain,
    "Mistral3ForConditionalGeneration": _plain,
    "MistralModel": _plain,
    "Qwen2Model": _qwen2,
    "Qwen2_5_VLForConditionalGeneration": _qwen2,
    "Qwen2_5_VLTextModel": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3Model": _qwen3,
    "T5EncoderModel": lambda c, n: t5(c, n, False),
    "UMT5EncoderModel": lambda c, n: t5(c, n, True),
}
