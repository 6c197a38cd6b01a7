"""Arithmetic on configs against counts on meta tensors of the real classes, for every bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffaccel import InvalidOptionError, UnsupportedModelError
from diffaccel.ledger import estimate
from diffaccel.ledger.models import bundled, from_folder, names, resolve
from tests import golden

DATA = Path(__file__).parents[1] / "data"
FACTS: dict[str, Any] = json.loads((DATA / "ledger_facts.json").read_text())["models"]
SHAPES = [(name, shape) for name, facts in FACTS.items() for shape in facts["shapes"]]


def of_shape(name: str, shape: dict[str, Any]) -> Any:
    return estimate(name, **{key: shape[key] for key in ("height", "width", "frames", "text_tokens")})


def test_every_bundled_model_has_facts() -> None:
    assert set(names()) == set(FACTS) and len(names()) == 22


@pytest.mark.parametrize("name", sorted(FACTS))
def test_parameters_are_exact(name: str) -> None:
    expected = FACTS[name]["params"]
    params = dict(estimate(name).params)
    assert params.pop("transformer_2", expected["transformer"]) == expected["transformer"]
    assert params == expected


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_flops_are_exact_and_peaks_near(name: str, shape: dict[str, Any]) -> None:
    ledger = of_shape(name, shape)
    forward = ledger.flops.forward
    assert (forward.linear, forward.attention, forward.conv) == tuple(
        shape[key] for key in ("linear", "attention", "conv")
    )
    assert ledger.flops.decode == shape["decode"]
    assert ledger.activation_bytes == pytest.approx(shape["activation_bytes"], rel=0.1)
    assert ledger.vae_peak_bytes == pytest.approx(shape["vae_peak_bytes"], rel=0.1)


def test_the_golden_file_holds() -> None:
    results = golden.run("ledger", json.loads((DATA / "ledger_golden.json").read_text()))
    assert [f"{name}: {why}" for name, why in results if why] == [] and len(results) == 39


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("params", "transformer"), 11901408321, "params.transformer"),
        (("weights_gib", "vae"), 0.16, "weights_gib.vae"),
        (("cfg_forwards",), 2, "cfg_forwards"),
        (("shapes", 0, "N_self_attention"), 4096, "tokens"),
        (("shapes", 0, "forward", "linear"), 61e12, "forward.linear"),
        (("shapes", 0, "attention_share"), 0.21, "attention_share"),
        (("shapes", 0, "per_generation", "vae_decode"), 5.0e12, "decode"),
        (("shapes", 0, "act_peak_bytes"), 9e8, "activation_bytes"),
        (("shapes", 0, "surprise"), 1, "unknown key 'surprise'"),
        (("surprise",), 1, "unknown key 'surprise'"),
    ],
)
def test_a_wrong_golden_value_fails(path: tuple[Any, ...], value: Any, said: str) -> None:
    data = json.loads((DATA / "ledger_golden.json").read_text())
    data["models"] = {"flux.1-dev": data["models"]["flux.1-dev"]}
    place = data["models"]["flux.1-dev"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    failures = [why for _, why in golden.run("ledger", data) if why]
    assert len(failures) == 1 and said in failures[0]


# ---- requests -------------------------------------------------------------------------------------------------------


def test_text_steps_and_guidance_are_inputs() -> None:
    short, long = (estimate("qwen-image", text_tokens=n) for n in (64, 512))
    assert short.tokens == 4160 and long.tokens == 4608
    assert estimate("qwen-image", guidance=1).flops.denoise * 2 == estimate("qwen-image").flops.denoise
    assert estimate("flux.1-dev", guidance=7).request.branches == 1  # embedded: one forward whatever the scale
    assert estimate("flux.1-dev", steps=4).flops.denoise * 7 == estimate("flux.1-dev", steps=28).flops.denoise
    assert estimate("hunyuanvideo-1.5", text_tokens=500).request.text_tokens == (500, 256, 729)


def test_two_experts_are_two_sets_of_weights_and_one_forward() -> None:
    one, two = estimate("wan2.1-t2v-14b", steps=40), estimate("wan2.2-t2v-a14b", height=720, width=1280)
    assert two.flops.denoise == one.flops.denoise
    assert two.weights_bytes["transformer_2"] == two.weights_bytes["transformer"] == one.weights_bytes["transformer"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "flux.1-dve"}, "did you mean 'flux.1-dev'"),
        ({"model": 7}, "must be a name or a folder"),
        ({"model": "flux.1-dev", "frames": 81}, "makes pictures"),
        ({"model": "flux.1-dev", "height": 0}, "height must be a whole number from 16"),
        ({"model": "flux.1-dev", "width": 1024.0}, "width must be a whole number"),
        ({"model": "flux.1-dev", "steps": True}, "steps must be"),
        ({"model": "sdxl", "guidance": "high"}, "guidance must be a number"),
        ({"model": "flux.1-dev", "text_tokens": (1, 2)}, "takes 1 lengths, got 2"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said) as caught:
        estimate(**arguments)
    assert len(str(caught.value)) <= 300


# ---- folders --------------------------------------------------------------------------------------------------------

LIBRARIES = {"CLIPTextModel": "transformers", "T5EncoderModel": "transformers"}


def save(folder: Path, name: str = "flux.1-dev", **changes: Any) -> Path:
    """The configs of a bundled model as diffusers lays them out; no weights."""
    model = bundled(name)
    parts: dict[str, tuple[str, dict[str, Any]]] = {
        "transformer": (model.denoiser, {"_class_name": model.denoiser, **model.config, **changes}),
        "vae": (model.vae, {"_class_name": model.vae, **model.vae_config}),
    }
    for index, encoder in enumerate(model.encoders):
        part = "text_encoder" + (f"_{index + 1}" if index else "")
        parts[part] = (encoder.kind, {"architectures": [encoder.kind], **encoder.config})
    rows = {part: [LIBRARIES.get(kind, "diffusers"), kind] for part, (kind, _) in parts.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **rows}))
    for part, (_, config) in parts.items():
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["flux.1-dev", "wan2.1-t2v-14b", "sd3-medium", "ltx-2-19b"])
def test_a_folder_of_configs_counts_as_the_bundled_model(tmp_path: Path, name: str) -> None:
    ours, bundled_one = estimate(save(tmp_path, name)), estimate(name)
    assert ours.flops == bundled_one.flops and ours.weights_bytes == bundled_one.weights_bytes
    assert ours.origin == f"folder, defaults as {name}" and ours.request == bundled_one.request


def test_a_folder_of_another_depth_counts_by_its_own_config(tmp_path: Path) -> None:
    ours = estimate(str(save(tmp_path, num_layers=8, guidance_embeds=False)))
    assert ours.params["transformer"] == 11891178560 - 11 * 6456794624 // 19
    assert from_folder(tmp_path).defaults.guidance == "none"


def test_a_folder_that_cannot_be_counted_says_why(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "transformer" / "config.json").write_text('{"_class_name": "FluxTransformer3DModel"}')
    with pytest.raises(UnsupportedModelError, match="no closed form for the transformer 'FluxTransformer3DModel'"):
        resolve(tmp_path)
    (tmp_path / "transformer" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(UnsupportedModelError, match="has no entry"):
        estimate(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="neither a transformer nor a unet"):
        resolve(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no model_index\.json"):
        resolve(tmp_path / "vae")
