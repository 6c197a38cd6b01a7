"""What a file holds that is not understood is named, never left out; patterns select before keys are checked."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffaccel import attach
from diffaccel.errors import InvalidOptionError, UnsupportedModelError
from tests import tiny

from .layouts import FLUX, WAN, Random, authored, kohya, peft
from .pipes import build, copied, distance, run

DOWN_UP = ("lora_down", "lora_up")
FLUX_LAYERS = r"blocks\.\d+\.attn\.to_[qv]"


def add_t5(state: dict[str, torch.Tensor]) -> str:
    name = "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q"
    state |= {f"{name}.lora_down.weight": torch.ones(1, 4), f"{name}.lora_up.weight": torch.ones(4, 1)}
    return "t5xxl"


def add_hada(state: dict[str, torch.Tensor]) -> str:
    state["transformer.transformer_blocks.0.attn.to_k.hada_w1_a"] = torch.ones(4, 1)
    return "hada_w1_a"


def add_mid(state: dict[str, torch.Tensor]) -> str:
    state["lora_unet_mid_block_resnets_0_conv1.lora_mid.weight"] = torch.ones(4, 4, 3, 3)
    return "lora_mid"


def add_projection(state: dict[str, torch.Tensor]) -> str:
    state |= {f"lora_te1_text_projection.lora_{end}.weight": torch.ones(4, 4) for end in ("down", "up")}
    return "text_projection"


def add_bias(state: dict[str, torch.Tensor]) -> str:
    state["transformer.transformer_blocks.0.attn.to_q.bias"] = torch.ones(4)
    return "to_q.bias"


def add_default(state: dict[str, torch.Tensor]) -> str:
    state["transformer.transformer_blocks.0.attn.to_k.lora_A.default.weight"] = torch.ones(4, 4)
    return "lora_A.default"


def add_alpha(state: dict[str, torch.Tensor]) -> str:
    state["transformer.nowhere.alpha"] = torch.tensor(1.0)
    return "nowhere"


def comfy(pipe: Any) -> dict[str, torch.Tensor]:
    return authored(pipe, FLUX, ends=DOWN_UP)


def plain(pipe: Any) -> dict[str, torch.Tensor]:
    return peft(pipe, FLUX_LAYERS)


@pytest.mark.parametrize(
    ("family", "make", "add"),
    [
        ("flux", comfy, add_t5),
        ("flux", comfy, add_projection),
        ("flux", plain, add_hada),
        ("flux", plain, add_bias),
        ("flux", plain, add_default),
        ("flux", plain, add_alpha),
        ("sdxl", lambda pipe: kohya(pipe, "attn1.to_q"), add_mid),
    ],
)
def test_keys_that_are_not_understood_are_named(family: str, make: Any, add: Any) -> None:
    pipe = attach(build(family))
    before = run(pipe, family)
    state = make(pipe)
    name = add(state)
    with pytest.raises(InvalidOptionError, match=name) as caught:
        pipe.acceleration.loras.load(state, "a")
    assert len(str(caught.value)) <= 300
    assert pipe.acceleration.loras.strengths == {} and torch.equal(run(pipe, family), before)


def test_a_pattern_takes_the_part_that_is_understood() -> None:
    pipe = attach(build("flux"))
    state = comfy(pipe)
    part = run_with(build("flux"), state)
    add_t5(state)
    pipe.acceleration.loras.load(state, "a", layers="transformer.*")
    assert distance(run(pipe, "flux"), part) <= 1e-6


def run_with(pipe: Any, state: dict[str, torch.Tensor]) -> torch.Tensor:
    pipe.load_lora_weights(copied(state), adapter_name="a")
    return run(pipe, "flux")


def test_text_encoder_keys_on_a_pipeline_without_text_encoders() -> None:
    pipe = attach(build("flux_cfg"))
    state = plain(pipe)
    text = peft(tiny.build("flux"), r"_proj$", component="text_encoder")
    with pytest.raises(InvalidOptionError, match="text_encoder: the pipeline has no such component"):
        pipe.acceleration.loras.load(state | text, "a")
    pipe.acceleration.loras.load(state | text, "a", layers="transformer.*")
    one = run(pipe, "flux_cfg")
    other = build("flux_cfg")
    other.load_lora_weights(copied(state), adapter_name="a")
    assert distance(one, run(other, "flux_cfg")) <= 1e-6
    with pytest.raises(InvalidOptionError, match=r"matches none of the LoRA's \d+ layers"):
        pipe.acceleration.loras.load(state | text, "b", layers="vae.*")


def test_differences_of_norms_are_left_out_as_in_diffusers_with_a_warning() -> None:
    pipe, other = attach(build("wan")), build("wan")
    state = authored(pipe, WAN, ends=DOWN_UP, bias=".diff_b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero = {"diffusion_model.blocks.0.norm3.diff": torch.zeros(4)}
        pipe.acceleration.loras.load(state | zero, "a")
    pipe.acceleration.loras.unload()
    state["diffusion_model.blocks.0.norm3.diff"] = torch.ones(4)
    with pytest.warns(UserWarning, match=r"blocks\.0\.norm3\.diff"):
        pipe.acceleration.loras.load(state, "a")
    other.load_lora_weights(copied(state), adapter_name="a")
    assert distance(run(pipe, "wan"), run(other, "wan")) <= 1e-6


def test_the_callers_tensors_stay_as_they_are() -> None:
    """Some of diffusers' converters scale them in place."""
    pipe = attach(build("wan"))
    state = authored(pipe, WAN, ends=DOWN_UP, alpha=lambda index: 1.0)
    before = copied(state)
    pipe.acceleration.loras.load(state, "a")
    assert list(state) == list(before) and all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"lora_alpha": 2.5}, ""),
        ({"lora_alpha": 3, "use_rslora": True}, ""),
        ({"lora_alpha": 2, "alpha_pattern": {r"^blocks\.[01]\..*to_q": 9}}, ""),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alpha_pattern": {"(to_q": 1}}, r"\(to_q"),
    ],
)
def test_what_a_header_says_counts_for_the_second_expert_too(entry: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Its keys begin with the first one's name."""
    pipe, other = attach(build("wan22")), build("wan22")
    state = peft(pipe, r"blocks\.\d+\.(attn1\.to_|ffn)", random=Random(0.3))
    config = {"r": 4, "lora_alpha": 4, "target_modules": ["to_q"], **entry}
    header = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    file = str(tmp_path / "lora.safetensors")
    save_file(state, file, {"format": "pt", "lora_adapter_metadata": header})
    if said:
        with pytest.raises((UnsupportedModelError, InvalidOptionError), match=said):
            pipe.acceleration.loras.load(file, "a", component="transformer_2")
        return
    other.load_lora_weights(file, adapter_name="a", load_into_transformer_2=True)
    pipe.acceleration.loras.load(file, "a", component="transformer_2")
    wanted = run(other, "wan22")
    assert distance(run(pipe, "wan22"), wanted) <= 1e-6
    pipe.acceleration.loras.unload()
    pipe.acceleration.loras.load(copied(state), "a", component="transformer_2")
    assert distance(run(pipe, "wan22"), wanted) > 1e-3, "the header makes no difference: no control"


def test_alphas_that_differ_count_layer_by_layer() -> None:
    """By hand: kohya's file with alphas is the one without whose up matrices are alpha / rank of it."""
    pipe = attach(build("sdxl"))
    layers, alphas = r"attn[12]\.to_|ff\.net", (1.0, 6.0, 2.5)
    state = kohya(pipe, layers, alpha=lambda index: alphas[index % 3])
    state |= kohya(
        pipe, r"_proj$|fc[12]", component="text_encoder", prefix="lora_te1_", names="text_model.{}".format,
        alpha=lambda index: alphas[index % 3],
    )  # fmt: skip
    folded = {}
    for key, value in state.items():
        if not key.endswith(".alpha"):
            scale = float(state[f"{key.split('.')[0]}.alpha"]) / 4
            folded[key] = value * scale if key.endswith("lora_up.weight") else value
    other = build("sdxl")
    other.load_lora_weights(folded, adapter_name="a")
    pipe.acceleration.loras.load(state, "a")
    assert distance(run(pipe, "sdxl"), run(other, "sdxl")) <= 5e-6
