"""DoRA and biases: both layouts alike, several adapters, merged, rescaled in a call, and on quantized layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffaccel import attach
from diffaccel.quantization.lora.layers import dense_weight, refusal
from diffaccel.quantization.lora.pairs import Pair
from tests import tiny

from . import layouts
from .layouts import FLUX, Random, authored, kohya, peft
from .pipes import build, copied, distance, fused, peft_layers, run

FLUX_LAYERS = r"blocks\.\d+\.(attn\.to_[qkv]|ff\.net|proj_)"
SDXL_LAYERS = r"attn[12]\.to_|ff\.net|resnets\.\d+\.conv[12]"


def by_diffusers(family: str, adapters: dict[str, tuple[layouts.State, float]]) -> Any:
    """A pipeline with the adapters, in order."""
    pipe = build(family)
    for name, (state, _) in adapters.items():
        pipe.load_lora_weights(copied(state), adapter_name=name)
    pipe.set_adapters(list(adapters), [strength for _, strength in adapters.values()])
    return pipe


def kohya_and_peft_of_sdxl(pipe: Any) -> tuple[layouts.State, layouts.State]:
    """One DoRA in both layouts (dots become underscores; alpha = rank)."""
    theirs = peft(pipe, SDXL_LAYERS, component="unet", dora=True)
    ours = {}
    for key, value in theirs.items():
        path, end = key.removeprefix("unet.").rsplit(".lora_", 1)
        new = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight", "magnitude_vector": "dora_scale"}[end]
        ndim = pipe.unet.get_submodule(path).weight.ndim
        value = value.flatten().view(-1, *(1,) * (ndim - 1)) if new == "dora_scale" else value
        ours[f"lora_unet_{path.replace('.', '_')}.{new}"] = value
    return ours, theirs


def kohya_and_peft_of_flux(pipe: Any) -> tuple[layouts.State, layouts.State]:
    """One DoRA in both layouts: the rows of a fused projection are those of its parts."""
    ours = authored(pipe, FLUX, form="lora_unet_{}", ends=("lora_down", "lora_up"), alpha=lambda index: 2.0, dora=True)
    plain = {key: value for key, value in ours.items() if not key.endswith(".dora_scale")}
    theirs = dict(pipe.lora_state_dict(copied(plain)))
    for name, owners in FLUX.items():
        scale = ours[f"lora_unet_{name.replace('.', '_')}.dora_scale"].flatten()
        rows = scale.split([pipe.transformer.get_submodule(owner).out_features for owner in owners])
        theirs |= {f"transformer.{o}.lora_magnitude_vector": part for o, part in zip(owners, rows, strict=True)}
    return ours, theirs


@pytest.mark.parametrize(("family", "make"), [("sdxl", kohya_and_peft_of_sdxl), ("flux", kohya_and_peft_of_flux)])
def test_kohyas_dora_is_pefts(family: str, make: Callable[[Any], tuple[layouts.State, layouts.State]]) -> None:
    pipe = build(family)
    plain = run(pipe, family)
    ours, theirs = make(pipe)
    wanted = run(by_diffusers(family, {"a": (theirs, 0.6)}), family)
    without = {key: value for key, value in theirs.items() if "magnitude" not in key}
    assert distance(run(by_diffusers(family, {"a": (without, 0.6)}), family), wanted) > 1e-2
    loras = attach(pipe).acceleration.loras
    for state in (ours, theirs):
        loras.load(copied(state), "a", 0.6)
        assert distance(run(pipe, family), wanted) <= 1e-6
        loras.unload()
        assert torch.equal(run(pipe, family), plain)


def test_a_dora_on_a_text_encoder() -> None:
    """transformers' loader leaves the magnitudes out (they stay those of the base weights): put in by hand there."""
    pipe = build("sd3")
    state = peft(pipe, r"_proj$|fc[12]", component="text_encoder", dora=True)
    other = by_diffusers("sd3", {"a": (state, 0.8)})
    without = run(other, "sd3")
    for key, value in state.items():
        if key.endswith(".lora_magnitude_vector"):
            path = key.removeprefix("text_encoder.").removesuffix(".lora_magnitude_vector")
            other.text_encoder.get_submodule(path).lora_magnitude_vector["a"].weight.data = value.clone()
    wanted = run(other, "sd3")
    attach(pipe).acceleration.loras.load(state, "a", 0.8)
    assert distance(run(pipe, "sd3"), wanted) <= 1e-6 and distance(without, wanted) > 1e-3


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    "kinds", [("dora", "dora"), ("plain", "dora"), ("bias", "dora"), ("dora", "bias"), ("bias", "bias")]
)
def test_several_adapters_act_in_order(kinds: tuple[str, str], merge: bool) -> None:
    pipe = build("flux")
    plain = run(pipe, "flux")
    states = [
        peft(pipe, FLUX_LAYERS, rank=3 + i, dora=kind == "dora", bias=kind == "bias", random=Random(0.3, i))
        for i, kind in enumerate(kinds)
    ]
    adapters = {"a": (states[0], 0.7), "b": (states[1], -0.4)}
    other = by_diffusers("flux", adapters)
    as_sum = merge and kinds != ("bias", "dora")  # (there peft's sum forgets that a DoRA scales earlier biases)
    wanted = fused(other, "flux") if as_sum else run(other, "flux")
    loras = attach(pipe).acceleration.loras
    for name, (state, strength) in adapters.items():
        loras.load(state, name, strength, merge=merge)
    assert distance(run(pipe, "flux"), wanted) <= 1e-6
    loras.unload()
    loras.load(states[1], "b", -0.4, merge=merge)
    loras.load(states[0], "a", 0.7, merge=merge)
    if "dora" in kinds:
        assert distance(run(pipe, "flux"), wanted) > 1e-4, "the order must matter"
    loras.unload()
    assert torch.equal(run(pipe, "flux"), plain)


@pytest.mark.parametrize("more", [{"dora": True}, {"bias": True}, {}])
def test_the_scale_of_a_call(more: dict[str, bool]) -> None:
    pipe = build("flux")
    state = peft(pipe, FLUX_LAYERS, **more)  # type: ignore[arg-type]
    other = by_diffusers("flux", {"a": (state, 0.8)})
    attach(pipe).acceleration.loras.load(state, "a", 0.8)
    for scale in (1.0, 0.3, 1.0):
        kwargs = {"joint_attention_kwargs": {"scale": scale}}
        assert distance(run(pipe, "flux", **kwargs), run(other, "flux", **kwargs)) <= 1e-6


@pytest.mark.parametrize("more", [{"dora": True}, {"bias": True}, {}])
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_bf16_and_two_prompts(family: str, more: dict[str, bool]) -> None:
    """Within the rounding of bf16: no further from float32 than peft in bf16 is."""
    component = "unet" if family == "sdxl" else "transformer"
    layers = SDXL_LAYERS if family == "sdxl" else FLUX_LAYERS
    pipe, other = build(family, dtype=torch.bfloat16), build(family, dtype=torch.bfloat16)
    state = peft(build(family), layers, component=component, size=0.1, **more)  # type: ignore[arg-type]
    call = {"prompt": list(tiny.PROMPTS[:2])}
    if family == "sdxl":
        call["negative_prompt"] = ["grey"] * 2
    exact = run(by_diffusers(family, {"a": (state, 0.8)}), family, **call)
    other.load_lora_weights(copied(state), adapter_name="a")
    other.set_adapters("a", 0.8)
    theirs = (run(other, family, **call).float() - exact).norm() / exact.norm()
    attach(pipe).acceleration.loras.load(state, "a", 0.8)
    ours = (run(pipe, family, **call).float() - exact).norm() / exact.norm()
    assert ours <= 1.3 * theirs, (ours, theirs)


def quantized(scheme: str) -> Any:
    """An accelerated pipeline with quantized weights."""
    pipe = build("flux")
    if scheme == "quanto":
        from optimum.quanto import freeze, qint8, quantize

        quantize(pipe.transformer, weights=qint8)
        freeze(pipe.transformer)
        return attach(pipe)
    name, _, how = scheme.partition(" ")
    return getattr(attach(pipe), f"enable_{name}")(scheme=how, keep_original="host")


@pytest.mark.parametrize("scheme", ["fp8 storage", "fp8 weight_only", "int8 weight_only", "quanto"])
@pytest.mark.parametrize("kind", ["dora", "bias", "plain"])
def test_on_quantized_weights(scheme: str, kind: str) -> None:
    """Equal to peft on a plain model that holds the dequantized weights."""
    other = build("flux")
    state = peft(other, FLUX_LAYERS, dora=kind == "dora", bias=kind == "bias")
    pipe, changed = quantized(scheme), 0
    for path, layer in pipe.transformer.named_modules():
        if isinstance(layer, torch.nn.Linear):
            dense = dense_weight(layer)
            assert dense is not None
            twin = other.transformer.get_submodule(path).weight
            changed += not torch.equal(twin, dense)
            twin.data = dense.to(twin.dtype).clone()
    assert changed > 10
    other.load_lora_weights(copied(state), adapter_name="a")
    other.set_adapters("a", 0.8)
    before = run(pipe, "flux")
    pipe.acceleration.loras.load(state, "a", 0.8)
    assert distance(run(pipe, "flux"), run(other, "flux")) < 1e-5
    pipe.acceleration.loras.unload()
    assert torch.equal(run(pipe, "flux"), before)


@pytest.mark.parametrize("kind", ["dora", "bias", "plain"])
def test_on_svdquant(kind: str) -> None:
    """y = m (W x + s B A x) + b with W what the 4-bit layer multiplies with, and m its rows' new lengths."""
    pipe = attach(build("flux")).enable_svdquant(rank=4, keep_original="host")
    before = run(pipe, "flux")
    state = peft(build("flux"), r"transformer_blocks\.0\.attn\.to_[qk]", dora=kind == "dora", bias=kind == "bias")
    name = "transformer_blocks.0.attn.to_q"
    layer = pipe.transformer.get_submodule(name)
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        base, dense, own = layer(x), layer.dense_weight(), layer.bias
    down, up = (state[f"transformer.{name}.lora_{which}.weight"] for which in "AB")
    delta = 0.8 * up @ down
    wanted = base - own + x @ delta.T
    if kind == "dora":
        length = (dense + delta).norm(dim=1)
        wanted = wanted * state[f"transformer.{name}.lora_magnitude_vector"] / length
    if kind == "bias":
        wanted = wanted + 0.8 * state[f"transformer.{name}.lora_B.bias"]
    pipe.acceleration.loras.load(state, "a", 0.8)
    with torch.no_grad():
        assert distance(layer(x), wanted + own) < 1e-5
    assert distance(run(pipe, "flux"), before) > 1e-3
    pipe.acceleration.loras.unload()
    assert torch.equal(run(pipe, "flux"), before)


@pytest.mark.parametrize("more", [{"dora": True}, {"bias": True}])
def test_a_new_strength_compiles_nothing(more: dict[str, bool]) -> None:
    pipe = attach(build("flux")).enable_compile(backend="eager", fullgraph=True)
    torch._dynamo.reset()
    state = peft(pipe, FLUX_LAYERS, **more)  # type: ignore[arg-type]
    pipe.acceleration.loras.load(state, "a", 0.5)
    run(pipe, "flux")
    with torch._dynamo.config.patch(error_on_recompile=True):
        pipe.acceleration.loras.set({"a": 0.8})
        found = run(pipe, "flux")
    assert distance(found, run(by_diffusers("flux", {"a": (state, 0.8)}), "flux")) <= 1e-6


def test_a_dora_on_codes_that_nobody_can_read_is_refused_by_name() -> None:
    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    pair = Pair(torch.ones(1, 4), torch.ones(4, 1), magnitude=torch.ones(4))
    assert "DoRA" in refusal(layer, pair)
    assert refusal(layer, Pair(pair.down, pair.up)) == ""
    assert peft_layers(build("flux")) == []


def test_merging_a_bias_into_a_layer_without_one_keeps_a_branch() -> None:
    pipe = build("sdxl")
    state = peft(pipe, r"attn1\.to_q|ff\.net\.2", component="unet", bias=True)
    wanted = run(by_diffusers("sdxl", {"a": (state, 0.8)}), "sdxl")
    attach(pipe).acceleration.loras.load(state, "a", 0.8, merge=True)
    how = {row.layer.endswith("to_q"): row.how for row in pipe.acceleration.loras.report}
    assert how == {True: "branch", False: "merged"}
    assert distance(run(pipe, "sdxl"), wanted) <= 5e-6  # (the sum of weights is rounded, the branch is not)


def test_kohya_with_a_magnitude_over_the_inputs_is_refused_by_name() -> None:
    pipe = attach(build("sdxl"))
    state = kohya(pipe, r"ff\.net\.2")
    key = next(key.removesuffix(".alpha") for key in state if key.endswith(".alpha"))
    state[f"{key}.dora_scale"] = torch.ones(1, state[f"{key}.lora_down.weight"].shape[1])
    with pytest.raises(ValueError, match=r"dora_scale: shape \(1, "):
        pipe.acceleration.loras.load(state, "a")
