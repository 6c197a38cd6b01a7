"""Files in nunchaku's layout and diffusers' Lite folders: what is read is what was written, to the last bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from diffaccel.errors import InvalidOptionError, UnsupportedModelError
from diffaccel.models.registry import CARDS
from diffaccel.quantization.svdquant.jobs import split_rows
from diffaccel.quantization.svdquant.math import Layer, Recipe, effective_weight, quantize_layer, reference_forward
from diffaccel.quantization.svdquant.nunchaku import (
    dequantize_awq,
    join_rows,
    pack_adaln,
    pack_part,
    quantize_awq,
    unpack_adaln,
    unpack_part,
)
from diffaccel.quantization.svdquant.nunchaku_files import NunchakuFile, export_lite, export_native
from tests.quantization.svdquant.models import SPEC, flux, quantized


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(a: Layer, b: Layer) -> None:
    """The same tensors, but for ranks filled up with zeros and a bias in 16 bits."""
    assert len(a.parts) == len(b.parts)
    for one, two in zip(a.parts, b.parts, strict=True):
        assert torch.equal(one.codes.packed, two.codes.packed) and one.unsigned == two.unsigned
        assert torch.equal(one.codes.scales.view(torch.uint8), two.codes.scales.view(torch.uint8))
        assert torch.equal(one.codes.float_scales(), two.codes.float_scales())
        assert torch.equal(one.smooth, two.smooth)
        rank = min(one.rank, two.rank)
        for x, y in ((one.down, two.down), (one.up.T, two.up.T)):
            assert torch.equal(x[:rank], y[:rank]) and not x[rank:].any() and not y[rank:].any()
    assert torch.equal(effective_weight(a), effective_weight(b))


@pytest.mark.parametrize("shape", [(128, 256), (100, 200)])
@pytest.mark.parametrize("precision", ["int4", "nvfp4"])
def test_a_part_comes_back_bit_by_bit(precision, shape):
    weight, bias = draw(*shape), draw(shape[0], seed=1).bfloat16().float()
    layer, _ = quantize_layer(weight, bias, Recipe(precision, 20, (0.5,)), draw(shape[1], seed=2).abs())
    tensors = pack_part(layer.parts[0], layer.bias)
    n, k, group = 128, 256, 64 if precision == "int4" else 16
    assert tensors["qweight"].shape == (n, k // 2) and tensors["wscales"].shape == (k // group, n)
    assert tensors["proj_down"].shape == (k, 32) and tensors["proj_up"].shape == (n, 32)
    part, back = unpack_part(tensors, *shape)
    same(Layer((part,), None), Layer(layer.parts, None))
    assert torch.equal(back.float(), bias)
    x = draw(5, shape[1], seed=3)
    torch.testing.assert_close(
        reference_forward(x, Layer((part,), back)), reference_forward(x, layer), rtol=1e-5, atol=1e-5
    )
    raw = {{"proj_down": "lora_down", "proj_up": "lora_up", "smooth_factor": "smooth"}.get(k, k): v
           for k, v in tensors.items()}  # fmt: skip
    assert torch.equal(unpack_part(raw, *shape)[0].up, part.up)


def test_a_scale_for_the_whole_tensor_is_taken_in():
    layer, _ = quantize_layer(draw(128, 128), None, Recipe("nvfp4", 16))
    tensors = pack_part(layer.parts[0], None)
    tensors["wtscale"] = torch.tensor([0.25])
    part, _ = unpack_part(tensors, 128, 128)
    assert torch.equal(part.codes.float_scales(), layer.parts[0].codes.float_scales() / 4)


def test_misfits_are_errors():
    tensors = pack_part(quantize_layer(draw(128, 128), None, Recipe())[0].parts[0], None)
    with pytest.raises(InvalidOptionError, match="300x128"):
        unpack_part(tensors, 300, 128)
    del tensors["wscales"]
    with pytest.raises(InvalidOptionError, match="lacks wscales"):
        unpack_part(tensors, 128, 128)


def test_fused_layers_come_apart_exactly():
    stacked = draw(3 * 128, 128)
    layer, _ = quantize_layer(stacked, None, Recipe(rank=16), draw(128).abs())
    parts = split_rows(layer.parts, [128, 128, 128])
    x = draw(7, 128, seed=4)
    apart = torch.cat([reference_forward(x, Layer(p, None)) for p in parts], -1)
    torch.testing.assert_close(apart, reference_forward(x, layer), rtol=0, atol=1e-5)
    same(join_rows([Layer(p, None) for p in parts]), layer)
    alone = [quantize_layer(w, None, Recipe(rank=16), draw(128).abs())[0] for w in stacked.split(128)]
    with pytest.raises(InvalidOptionError, match="layout='nunchaku'"):
        join_rows(alone)


def test_awq_and_adaln():
    weight, bias = draw(96, 128) / 10, draw(96, seed=1)
    tensors = quantize_awq(weight)
    assert tensors["qweight"].shape == (24, 64) and tensors["wscales"].shape == (2, 96)
    step = tensors["wscales"].T.float().repeat_interleave(64, 1)
    assert bool(((dequantize_awq(tensors) - weight).abs() <= 0.6 * step).all())
    packed = pack_adaln(weight, bias, 6)
    # row of channel 3 in chunk 1 (scale of the first norm), and its 1
    assert torch.allclose(dequantize_awq(packed)[3 * 6 + 1], weight[16 + 3], atol=float(step.max()))
    assert float(packed["bias"][3 * 6 + 1]) == pytest.approx(float(bias[16 + 3]) + 1, rel=0.01)
    back, its = unpack_adaln(packed, 6)
    assert bool(((back - weight).abs() <= 0.6 * step.max()).all())
    torch.testing.assert_close(its, bias, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("precision", "heads"), [("int4", 2), ("nvfp4", 2), ("int4", 3)])
def test_a_native_file_comes_back(precision, heads, tmp_path):
    model = flux(heads)
    layers = quantized(model, "nunchaku", precision)
    path = tmp_path / "svdq.safetensors"
    export_native(model, SPEC, layers, path)
    assert NunchakuFile.is_one(path)
    file = NunchakuFile(path)
    back = dict(file.layers(model, SPEC))
    assert set(back) == set(layers) and file.precision() == precision
    for name in layers:
        same(back[name], layers[name])
    assert back["single_transformer_blocks.0.proj_out"].parts[1].unsigned == (precision == "int4")
    assert back["transformer_blocks.0.ff.net.2"].parts[0].unsigned == (precision == "int4")
    dtype = {"int4": "int4", "nvfp4": "fp4_e2m1_all"}[precision]
    assert (file.config["rank"], file.config["weight"]["dtype"]) == (32, dtype)
    names = set(load_file(path))
    block = "transformer_blocks.0"
    for name in (f"{block}.qkv_proj.qweight", f"{block}.mlp_context_fc2.lora_down", f"{block}.norm1.linear.wzeros",
                 f"{block}.norm_added_q.weight", "single_transformer_blocks.0.out_proj.smooth_orig",
                 "single_transformer_blocks.0.mlp_fc2.bias", "x_embedder.weight"):  # fmt: skip
        assert name in names
    weight, _ = file.adaln(f"{block}.norm1.linear", 6)
    truth = model.transformer_blocks[0].norm1.linear.weight.detach()
    assert float((weight - truth).norm() / truth.norm()) < 0.1


def test_a_native_file_needs_its_layout_and_its_family(tmp_path):
    model = flux()
    with pytest.raises(InvalidOptionError, match="layout='nunchaku'"):
        export_native(model, SPEC, quantized(model, "best"), tmp_path / "a.safetensors")
    layers = quantized(model, "nunchaku")
    with pytest.raises(UnsupportedModelError, match="flux only, and this is wan"):
        export_native(model, CARDS["wan"], layers, tmp_path / "a.safetensors")
    del layers["transformer_blocks.0.attn.to_k"]
    with pytest.raises(UnsupportedModelError, match="to_k in 4 bits"):
        export_native(model, SPEC, layers, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["int4", "nvfp4"])
def test_a_lite_folder_is_what_diffusers_would_match(precision, tmp_path):
    from diffusers.quantizers.quantization_config import NunchakuLiteQuantizationConfig

    model = flux()
    layers = quantized(model, "lite", precision)
    targets = export_lite(model, layers, tmp_path)
    assert set(targets) == set(layers)
    config = json.loads((tmp_path / "config.json").read_text())
    parsed = NunchakuLiteQuantizationConfig.from_dict(config["quantization_config"])
    assert parsed.svdq_w4a4["targets"] == targets and parsed.svdq_w4a4["rank"] == 32
    assert parsed.compute_dtype == torch.bfloat16
    fields = {"qweight", "wscales", "smooth_factor", "proj_down", "proj_up", "bias"}
    fields |= {"wcscales", "wtscale"} if precision == "nvfp4" else set()
    plain = set(model.state_dict()) - {f"{t}.{f}" for t in targets for f in ("weight", "bias")}
    with safe_open(tmp_path / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert set(held) == plain | {f"{t}.{f}" for t in targets for f in fields}
    assert held[f"{targets[0]}.qweight"] == (128, 64) and held[f"{targets[0]}.proj_up"] == (128, 32)
    back = dict(NunchakuFile(tmp_path).layers(model, SPEC))
    for name in layers:
        same(back[name], layers[name])
        assert not back[name].parts[0].unsigned
    rebuilt = type(model).from_config({k: v for k, v in config.items() if k != "quantization_config"})
    assert set(rebuilt.state_dict()) == set(model.state_dict())


def test_lite_needs_its_layout_and_wide_layers(tmp_path):
    model = flux()
    with pytest.raises(InvalidOptionError, match="layout='lite'"):
        export_lite(model, quantized(model, "best"), tmp_path)
    narrow = flux(1)
    with pytest.raises(UnsupportedModelError, match="128"):
        export_lite(narrow, quantized(narrow, "lite"), tmp_path)


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(InvalidOptionError, match="no such file"):
        NunchakuFile(tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1)}, str(tmp_path / "y.safetensors"))
    assert not NunchakuFile.is_one(tmp_path / "y.safetensors")
    with pytest.raises(InvalidOptionError, match="no 4-bit layers"):
        NunchakuFile(tmp_path / "y.safetensors")
