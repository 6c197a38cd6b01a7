"""Control LoRAs: they make the input layer wider and bring norms, and go without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxControlPipeline

from diffaccel import attach, restore
from diffaccel.quantization.lora.files import read
from diffaccel.quantization.lora.layers import refusal
from diffaccel.quantization.lora.pairs import Pair
from diffaccel.quantization.weights import ScaledWeight
from tests import fingerprint, tiny

from .layouts import Random, peft
from .pipes import copied, distance

LAYERS = r"blocks\.\d+\.(attn\.to_[qv]|ff\.net)|x_embedder"
WIDE, NARROW = 32, 16


def control_pipe() -> Any:
    """The control pipeline around a plain model, which is too narrow for it."""
    parts = tiny.build("flux").components
    pipe = FluxControlPipeline(**{k: v for k, v in parts.items() if k not in ("image_encoder", "feature_extractor")})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def control_lora(pipe: Any) -> dict[str, torch.Tensor]:
    """Twice the inputs, biases, and norms that take the place of the model's."""
    random = Random(0.3, 5)
    state = peft(pipe, LAYERS, bias=True)
    state["transformer.x_embedder.lora_A.weight"] = random(4, WIDE)
    for name, parameter in pipe.transformer.named_parameters():
        if name.endswith(("attn.norm_q.weight", "attn.norm_added_k.weight")):
            state[f"transformer.{name}"] = 1 + random(parameter.numel())
    return state


def run(pipe: Any) -> torch.Tensor:
    """Two steps with a picture to follow."""
    picture = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(77))
    more = {"num_inference_steps": 2, "output_type": "latent", "control_image": picture}
    return tiny.output(pipe(**{**tiny.call_kwargs("flux"), **more}))


def forward(transformer: Any) -> torch.Tensor:
    """The narrow model by itself."""
    generator = torch.Generator().manual_seed(0)
    given = {
        "hidden_states": torch.randn(1, 4, NARROW, generator=generator),
        "encoder_hidden_states": torch.randn(1, 3, 32, generator=generator),
        "pooled_projections": torch.randn(1, 32, generator=generator),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    with torch.no_grad():
        return transformer(**given, return_dict=False)[0]


@pytest.mark.parametrize("merge", [False, True])
def test_equals_diffusers_and_goes_without_a_trace(merge: bool) -> None:
    pipe, other = control_pipe(), control_pipe()
    state = control_lora(pipe)
    attach(pipe).acceleration.loras.load(state, "first")
    run(pipe)  # (leaves what any run leaves; without a LoRA this pipeline cannot run)
    restore(pipe)
    before, plain = fingerprint.snapshot_pipe(pipe), forward(pipe.transformer)
    config = dict(pipe.transformer.config), pipe.transformer.config.in_channels
    other.load_lora_weights(copied(state), adapter_name="a")
    other.set_adapters("a", 0.8)
    wanted = run(other)
    loras = attach(pipe).acceleration.loras
    loras.load(state, "a", 0.8, merge=merge)
    assert pipe.transformer.x_embedder.in_features == WIDE and pipe.transformer.config.in_channels == WIDE
    assert distance(run(pipe), wanted) <= 1e-6
    loras.set({"a": 0.7})
    assert distance(run(pipe), wanted) > 1e-4
    assert {row.how for row in loras.report} == {"replaced", "merged" if merge else "branch"}
    loras.unload()
    assert (dict(pipe.transformer.config), pipe.transformer.config.in_channels) == config
    assert pipe.transformer.x_embedder.in_features == NARROW
    assert torch.equal(forward(pipe.transformer), plain)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_beside_a_lora_of_the_narrow_model_in_either_order() -> None:
    pipe, other = control_pipe(), control_pipe()
    wide, narrow = control_lora(pipe), peft(pipe, LAYERS, rank=3, random=Random(0.3, 8))
    other.load_lora_weights(copied(wide), adapter_name="wide")
    other.load_lora_weights(copied(narrow), adapter_name="narrow")
    other.set_adapters(["wide", "narrow"], [1.0, 0.5])
    wanted, found = run(other), []
    for order in (("wide", "narrow"), ("narrow", "wide")):
        one = attach(control_pipe())
        for name in order:
            one.acceleration.loras.load(
                {"wide": wide, "narrow": narrow}[name], name, {"wide": 1.0, "narrow": 0.5}[name]
            )
        found.append(run(one))
        one.acceleration.loras.unload("wide")
        assert one.transformer.x_embedder.in_features == NARROW
    assert all(distance(output, wanted) <= 1e-6 for output in found)


def test_a_quantized_input_layer_is_refused() -> None:
    """Zeros cannot be put beside codes. (Our own quantization keeps input layers, other libraries may not.)"""
    layer = torch.nn.Linear(4, 4)
    pair = Pair(torch.ones(1, 8), torch.ones(4, 1))
    assert refusal(layer, pair) == ""
    weight = ScaledWeight.of(layer.weight, torch.int8, "weight_only")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert "makes the layer wider" in refusal(layer, pair)


def flux_on_meta() -> Any:
    """FLUX.1 as it is, without values: the authors' converters know only its sizes."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        transformer = FluxTransformer2DModel(guidance_embeds=True)
    names = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return FluxControlPipeline(transformer=transformer, **dict.fromkeys(names))


def bfl_state(form: str, norms: bool) -> dict[str, torch.Tensor]:
    """Rank 2 on every layer, in Black Forest Labs' names."""
    random, state, d = Random(), {}, 3072

    def add(name: str, inputs: int, outputs: int) -> None:
        state[form.format(f"{name}.lora_A.weight")] = random(2, inputs)
        state[form.format(f"{name}.lora_B.weight")] = random(outputs, 2)

    for i in range(19):
        for side in ("img", "txt"):
            add(f"double_blocks.{i}.{side}_mod.lin", d, 6 * d)
            add(f"double_blocks.{i}.{side}_attn.qkv", d, 3 * d)
            add(f"double_blocks.{i}.{side}_attn.proj", d, d)
            add(f"double_blocks.{i}.{side}_mlp.0", d, 4 * d)
            add(f"double_blocks.{i}.{side}_mlp.2", 4 * d, d)
            for which in ("query", "key") if norms else ():
                state[form.format(f"double_blocks.{i}.{side}_attn.norm.{which}_norm.scale")] = random(128)
    for i in range(38):
        add(f"single_blocks.{i}.linear1", d, 7 * d)
        add(f"single_blocks.{i}.linear2", 5 * d, d)
        add(f"single_blocks.{i}.modulation.lin", d, 3 * d)
        for which in ("query", "key") if norms else ():
            state[form.format(f"single_blocks.{i}.norm.{which}_norm.scale")] = random(128)
    add("final_layer.linear", d, 64)
    if norms:
        for name, inputs in (("time_in", 256), ("guidance_in", 256), ("vector_in", 768)):
            add(f"{name}.in_layer", inputs, d)
            add(f"{name}.out_layer", d, d)
        add("txt_in", 4096, d)
        add("img_in", 128, d)
        add("final_layer.adaLN_modulation.1", d, 2 * d)
    return state


@pytest.mark.parametrize(("form", "norms"), [("{}", True), ("base_model.model.{}", False)])
def test_the_authors_own_files_of_flux_are_read_whole(form: str, norms: bool) -> None:
    """BFL's Control LoRAs and fal's of Kontext; what their matrices become is diffusers' converter's."""
    pipe = flux_on_meta()
    state = bfl_state(form, norms)
    found = read(pipe, state)["transformer"]
    converted = pipe.lora_state_dict(copied(state))
    assert {f"transformer.{path}" for path in found} == {
        key.split(".lora_")[0].removesuffix(".weight") for key in converted
    }
    for path, added in found.items():
        if hasattr(added, "up"):
            assert torch.equal(added.up, converted[f"transformer.{path}.lora_B.weight"]) and added.scale == 1.0
    assert (found["x_embedder"].down.shape[1] == 128) if norms else ("x_embedder" not in found)  # type: ignore[union-attr]
