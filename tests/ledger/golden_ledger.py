"""Golden cases of the ledger (KIND ledger of tests/golden.py): the keys that each level knows, and the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from diffaccel.ledger import estimate
from diffaccel.ledger.book import Ledger
from diffaccel.ledger.closed.shape import width_of
from diffaccel.ledger.models import resolve
from tests.golden import Mismatch, compare

Data = dict[str, Any]

AUDIO = {"ltx-2-19b"}  # models whose closed form may be 5 % off

MODEL_KEYS = {
    *("params", "weights_gib", "default_steps", "cfg_forwards", "d_model", "self_attention_layers", "text"),
    *("text_encoders", "shapes"),
}
# Of a shape: what is asked for, what is compared, and what explains the reference itself.
SHAPE_KEYS = {
    *("height", "width", "frames", "text_tokens"),
    *("N_self_attention", "forward", "attention_share", "per_generation", "act_peak_bytes", "vae_peak_fp32_bytes"),
    *("N_img", "N_txt", "P_img", "P_txt", "P_cond"),
    *("linear_by_rows", "flopcounter_residual", "vae_flops_basis", "note", "notes", "N_audio"),
}
REMARKS = "closed_form_"  # keys that begin so say how far simpler formulas are off; nothing of ours to compare


def _known(data: Data, allowed: set[str], where: str) -> None:
    strange = sorted(key for key in set(data) - allowed if not key.startswith(REMARKS))
    if strange:
        raise Mismatch(f"unknown key {strange[0]!r} in {where}")


def within(expected: float | None, actual: float | None, part: float, where: str) -> None:
    """Raise unless `actual` is within `part` of `expected`; None is not compared."""
    if expected is None:
        return
    if actual is None or abs(actual - expected) > part * abs(expected):
        raise Mismatch(f"{where}: expected {expected!r} within {part:.1%}, got {actual!r}")


def cases(models: Data) -> Iterator[tuple[str, Callable[[], None]]]:
    """A case per model, and one per shape."""
    for name, facts in models.items():
        yield name, lambda name=name, facts=facts: check_model(name, facts)
        for shape in facts.get("shapes", ()):
            size = "x".join(str(shape[key]) for key in ("width", "height", "frames") if shape.get(key))
            text = "+".join(map(str, shape.get("text_tokens") or ()))
            yield f"{name} {size} text {text}", lambda name=name, shape=shape: check_shape(name, shape)


def check_model(name: str, facts: Data) -> None:
    """Parameters exact, weights within 1 %, defaults, and each text encoder."""
    _known(facts, MODEL_KEYS, name)
    ledger, model = estimate(name), resolve(name)
    compare(facts.get("params"), ledger.params, "params")
    for part, size in (facts.get("weights_gib") or {}).items():
        within(size, ledger.weights_gib.get(part), 0.01, f"weights_gib.{part}")
    compare(facts.get("default_steps"), ledger.request.steps, "default_steps")
    compare(facts.get("cfg_forwards"), ledger.request.branches, "cfg_forwards")
    if facts.get("d_model") is not None:
        compare(facts["d_model"], model.config.get("dim") or width_of(model.config), "d_model")
    for fact, encoder in zip(facts.get("text_encoders") or (), model.encoders, strict=True):
        _known(fact, {"name", "params", "tokens", "flops"}, f"text encoder of {name}")
        compare(fact.get("tokens"), encoder.tokens, f"{encoder.name}.tokens")
        compare(fact.get("params"), ledger.params["text_encoders"][encoder.name], f"{encoder.name}.params")


def check_shape(name: str, shape: Data) -> None:
    """Tokens exact; FLOPs, share and peaks within the tolerances of the format."""
    _known(shape, SHAPE_KEYS, f"a shape of {name}")
    ledger = estimate(
        name,
        height=shape["height"],
        width=shape["width"],
        frames=shape.get("frames"),
        text_tokens=shape.get("text_tokens"),
    )
    compare(shape.get("N_self_attention"), ledger.tokens, "tokens")
    compare(shape.get("N_img"), ledger.image_tokens, "image tokens")
    part = 0.05 if name in AUDIO else 0.02
    _known(shape.get("forward") or {}, {"linear", "attention", "self_attention_main", "conv", "total"}, "forward")
    for kind in ("linear", "attention", "conv", "total"):
        within((shape.get("forward") or {}).get(kind), getattr(ledger.flops.forward, kind), part, f"forward.{kind}")
    share = shape.get("attention_share")
    if share is not None and abs(share - ledger.attention_share) > 0.005:
        raise Mismatch(f"attention_share: expected {share:.4f}, got {ledger.attention_share:.4f}")
    _check_generation(shape.get("per_generation") or {}, ledger, part)
    within(shape.get("act_peak_bytes"), ledger.activation_bytes, 0.4, "activation_bytes")
    within(shape.get("vae_peak_fp32_bytes"), ledger.vae_peak_bytes, 0.4, "vae_peak_bytes")
    for key, passed in (("P_img", "image"), ("P_txt", "text"), ("P_cond", "condition")):
        within(shape.get(key), ledger.per_token[passed], part, key)


def _check_generation(expected: Data, ledger: Ledger, part: float) -> None:
    _known(expected, {"denoiser", "text_encoders", "vae_decode", "total"}, "per_generation")
    flops = ledger.flops
    within(expected.get("denoiser"), flops.denoise, part, "denoise")
    within(expected.get("text_encoders"), flops.encode, part, "encode")
    within(expected.get("vae_decode"), flops.decode, 0.03, "decode")
    total = flops.total
    if "vae_decode" in expected and expected["vae_decode"] is None:  # the reference leaves it out of its total too
        total -= flops.decode or 0
    within(expected.get("total"), total, part, "total")
