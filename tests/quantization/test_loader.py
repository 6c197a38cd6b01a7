"""Loading into quantized weights: the same model as quantizing in place, without the full one in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import diffaccel
from diffaccel import accelerate, load_quantized
from diffaccel.errors import IncompatibleError, InvalidOptionError, UnsupportedModelError
from diffaccel.quantization.fp8_int8 import Fp8, Int8
from diffaccel.quantization.weights import ScaledWeight
from tests import tiny
from tests.loaded.authors import authors_state


@pytest.fixture(scope="module", params=("flux", "wan"))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(family, folder) of a saved pipeline, its denoiser in several files."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny.build(request.param).save_pretrained(folder, max_shard_size="60KB")
    return request.param, folder


def _live(family: str, folder: Path, dtype: torch.dtype, **wishes: Any) -> Any:
    pipe = type(tiny.build(family)).from_pretrained(folder, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return accelerate(pipe, None, strict=True, **wishes)


def _same(loaded: nn.Module, live: nn.Module) -> int:
    """Number of quantized weights; all parameters and buffers of the two must be equal."""
    theirs = {**dict(live.named_parameters()), **dict(live.named_buffers())}
    mine = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert type(mine[name].data) is type(value.data) and mine[name].dtype == value.dtype, name
        if isinstance(value, ScaledWeight):
            assert torch.equal(mine[name].codes.float(), value.codes.float()) and mine[name].scheme == value.scheme
            assert torch.equal(mine[name].scale, value.scale)
        else:
            assert torch.equal(mine[name], value), name
    return sum(isinstance(value, ScaledWeight) for value in theirs.values())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_it_is_the_model_quantized_in_place(saved: tuple[str, Path], dtype: torch.dtype) -> None:
    family, folder = saved
    loaded = load_quantized(folder, Fp8("weight_only", text_encoders=True), dtype=dtype)
    live = _live(
        family, folder, dtype, quantization="fp8", quantization_scheme="weight_only", quantization_text_encoders=True
    )
    assert type(loaded).__name__ == type(live).__name__
    for name, module in tiny.component_modules(live):
        count = _same(getattr(loaded, name), module)
        assert (count > 0) is (name != "vae") and not getattr(loaded, name).training
    loaded.set_progress_bar_config(disable=True)
    mine, theirs = tiny.run(loaded, family).float(), tiny.run(live, family).float()
    assert float((mine - theirs).norm() / theirs.norm()) < (1e-5 if dtype is torch.float32 else 0.02)


def test_what_accelerate_says_about_it(saved: tuple[str, Path]) -> None:
    family, folder = saved
    if family != "flux":
        pytest.skip("one family is enough")
    pipe = load_quantized(folder, "fp8_weight_only", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    out = tiny.run(pipe, family)
    accelerate(pipe, None, strict=True, quantization="fp8", quantization_scheme="weight_only", cache="first_block")
    assert "loaded like this already" in pipe.acceleration.plan.item("quantization.fp8").reason
    assert torch.equal(tiny.run(pipe, family), out) and pipe.acceleration.plan.enabled == ("cache.first_block",)
    with pytest.raises(IncompatibleError, match="quantized already"):
        accelerate(pipe, None, strict=True, quantization="int8")
    assert torch.equal(tiny.run(diffaccel.restore(pipe), family), out)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux_one")
    tiny.build("flux").save_pretrained(folder)
    return folder


def test_a_single_file(flux: Path, tmp_path: Path) -> None:
    """In the layout of diffusers: with a pipeline's folder a pipeline comes back, with a model's a model."""
    file = tmp_path / "model.safetensors"
    file.write_bytes((flux / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes())
    whole = load_quantized(flux, Int8("weight_only"), dtype=torch.float32)
    pipe = load_quantized(file, Int8("weight_only"), config=flux, dtype=torch.float32)
    model = load_quantized(file, "int8_weight_only", config=flux / "transformer", dtype=torch.float32)
    assert type(pipe).__name__ == "FluxPipeline" and type(model).__name__ == "FluxTransformer2DModel"
    assert _same(pipe.transformer, whole.transformer) == _same(model, whole.transformer) == 34
    bare = load_quantized(flux / "transformer", "int8_weight_only", dtype=torch.float32)
    assert _same(bare, model) == 34


def test_a_single_file_under_its_authors_names(tmp_path: Path) -> None:
    model = tiny.build("wan").transformer
    model.save_pretrained(tmp_path / "diffusers")
    save_file(authors_state(model), tmp_path / "authors.safetensors")
    loaded = load_quantized(
        tmp_path / "authors.safetensors", "fp8_weight_only", config=tmp_path / "diffusers", dtype=torch.float32
    )
    truth = load_quantized(tmp_path / "diffusers", "fp8_weight_only", dtype=torch.float32)
    assert _same(loaded, truth) == 30


def test_what_does_not_fit_is_named(flux: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="no such file or folder"):
        load_quantized(tmp_path / "nowhere")
    with pytest.raises(InvalidOptionError, match="fp8_dynamic"):
        load_quantized(flux, "fp8_dynamics")
    with pytest.raises(InvalidOptionError, match="config=None"):
        load_quantized(flux / "transformer" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(InvalidOptionError, match="neither model_index"):
        load_quantized(flux / "scheduler")
    with pytest.raises(InvalidOptionError, match="float8"):
        load_quantized(flux, dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModelError, match="AutoencoderKL"):
        load_quantized(flux / "vae")
    state = load_file(flux / "transformer" / "diffusion_pytorch_model.safetensors")
    bad = tmp_path / "bad.safetensors"
    save_file({k: v for k, v in state.items() if not k.endswith("to_q.weight")}, bad)
    with pytest.raises(UnsupportedModelError, match=r"lacks 4 tensors .*to_q\.weight"):
        load_quantized(bad, config=flux)
    save_file(state | {"proj_out.weight": torch.zeros(3, 3)}, bad)
    with pytest.raises(UnsupportedModelError, match=r"proj_out\.weight has the shape \(3, 3\)"):
        load_quantized(bad, config=flux)
    save_file({"something.weight": torch.zeros(3)}, bad)
    with pytest.raises(UnsupportedModelError, match="cannot convert"):
        load_quantized(bad, config=flux)


MEASURE = """
import json, sys, threading, time
import torch
from diffusers import WanTransformer3DModel
from diffaccel import load_quantized
from diffaccel.quantization.weights import weight_bytes
from diffaccel.quantization.formats import FP8, quantize_weight, weight_only
folder, how = sys.argv[1:]
weight_only(torch.ones(2, 64), *quantize_weight(torch.ones(64, 64), FP8, True), None)  # everything is loaded by now
load_quantized(folder + "/small", "fp8_weight_only")

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

peak, base, on = 0, resident(), True
def watch():
    global peak
    while on:
        peak = max(peak, resident())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
if how == "stream":
    model = load_quantized(folder + "/large", "fp8_weight_only")
else:
    from diffaccel.quantization.fp8_int8 import Fp8
    from diffaccel.quantization.policy import select
    from diffaccel.models import CARDS
    model = WanTransformer3DModel.from_pretrained(folder + "/large", torch_dtype=torch.bfloat16)
    for name in select(model, CARDS["wan"]).quantized:
        layer = model.get_submodule(name)
        layer.weight = torch.nn.Parameter(Fp8("weight_only").recipe(None).convert(layer.weight), requires_grad=False)
on = False
thread.join()
print(json.dumps({"peak": peak - base, "quantized": weight_bytes(model)}))
"""


@pytest.mark.slow
def test_the_full_model_is_never_in_memory(tmp_path: Path) -> None:
    """Resident memory of a process of its own, against the negative control of loading first, then quantizing."""
    from diffusers import WanTransformer3DModel

    def save(name: str, width: int, layers: int) -> None:
        model = WanTransformer3DModel(
            num_attention_heads=width // 64,
            attention_head_dim=64,
            num_layers=layers,
            ffn_dim=4 * width,
            text_dim=64,
            freq_dim=64,
        ).bfloat16()
        model.save_pretrained(tmp_path / name, max_shard_size="20MB")

    save("small", 128, 1)
    save("large", 768, 8)
    shard = max(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    found = {}
    for how in ("stream", "whole"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), how]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found[how] = json.loads(done.stdout.splitlines()[-1])
    size = found["stream"]["quantized"]
    assert size == found["whole"]["quantized"] > 70e6
    allowed = 1.3 * size + shard
    assert found["stream"]["peak"] <= allowed, found
    assert found["whole"]["peak"] > allowed, f"the negative control: {found}"


def test_saving_what_was_loaded_so_is_refused_by_name(saved: tuple[str, Path], tmp_path: Path) -> None:
    pipe = accelerate(load_quantized(saved[1], "int8_weight_only"), None)
    with pytest.raises(IncompatibleError, match="save_pretrained: the weights came from load_quantized"):
        pipe.save_pretrained(tmp_path / "again")
