"""A quantized weight inside an ordinary layer: casts, copies, state dicts, compiled code, adapters."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from diffaccel.errors import IncompatibleError
from diffaccel.quantization import formats
from diffaccel.quantization.weights import ScaledWeight, tensor_bytes, weight_bytes

SCHEMES = ("dynamic", "weight_only", "storage")


def _layer(
    scheme: str = "weight_only", kind: torch.dtype = formats.FP8, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, dtype=dtype)
    layer.weight = nn.Parameter(ScaledWeight.of(layer.weight, kind, scheme), requires_grad=False)
    return layer


def _inside(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    weight = layer.weight
    assert isinstance(weight, ScaledWeight) and isinstance(weight, nn.Parameter)
    return weight.codes.float(), weight.scale


def test_it_looks_like_the_weight_it_replaces() -> None:
    layer = _layer(dtype=torch.bfloat16)
    assert type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter)
    assert layer.weight.shape == (48, 32) and layer.weight.dtype is torch.bfloat16 and not layer.weight.requires_grad
    assert tensor_bytes(layer.weight) == 48 * 32 + 4 * 48
    assert weight_bytes(layer) == 48 * 32 + 4 * 48 + 2 * 48
    assert torch.equal(layer.weight.t(), layer.weight.dequantize().t()), "other operations see the values"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", (formats.FP8, torch.int8), ids=("fp8", "int8"))
def test_a_cast_loses_no_scale(scheme: str, kind: torch.dtype) -> None:
    """X3: `.to(bfloat16)` after quantization neither undoes it nor drops the scales."""
    layer = _layer(scheme, kind)
    codes, scale = _inside(layer)
    x = torch.randn(3, 32)
    before = layer(x)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer.to(dtype)
        assert layer.weight.dtype is dtype and layer(x.to(dtype)).dtype is dtype
        assert torch.equal(_inside(layer)[0], codes) and torch.equal(_inside(layer)[1], scale)
    layer.bias = nn.Parameter(_layer(scheme, kind).bias.data)  # the bias itself was rounded on the way
    assert torch.equal(layer(x), before)


def test_state_dict_round_trips() -> None:
    layer, other = _layer(), _layer()
    other.weight.codes.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(_inside(other)[0], _inside(layer)[0])
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(loaded) == ["weight", "bias"] and torch.equal(loaded["weight"].scale, layer.weight.scale)
    twin = copy.deepcopy(layer)
    assert torch.equal(_inside(twin)[0], _inside(layer)[0]) and twin.weight is not layer.weight


def test_plain_values_are_not_written_into_it() -> None:
    layer = _layer()
    codes, _ = _inside(layer)
    with pytest.raises(IncompatibleError, match="in place"):
        layer.weight.data += 1
    with pytest.raises(RuntimeError, match="plain tensor cannot be copied into a quantized weight"):
        layer.load_state_dict({"weight": torch.zeros(48, 32), "bias": torch.zeros(48)})
    assert torch.equal(_inside(layer)[0], codes)


def test_flatten_and_back() -> None:
    weight = _layer("dynamic", dtype=torch.bfloat16).weight
    names, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name).clone() for name in names}
    again = ScaledWeight.__tensor_unflatten__(inner, context, weight.shape, weight.stride())
    assert again.scheme == "dynamic" and again.dtype is torch.bfloat16
    assert torch.equal(again.codes.float(), weight.codes.float()) and torch.equal(again.scale, weight.scale)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", (formats.FP8, torch.int8), ids=("fp8", "int8"))
def test_compiled_code_is_whole_and_the_same(scheme: str, kind: torch.dtype) -> None:
    torch._dynamo.reset()
    layer, x = _layer(scheme, kind), torch.randn(3, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    other = _layer(scheme, kind)
    other.weight.scale.mul_(2)
    layer.weight = other.weight
    assert torch.equal(compiled(x), layer(x)), "the graph reads the weight that is there"


def test_inference_mode_and_no_grad() -> None:
    layer, x = _layer("dynamic"), torch.randn(3, 32)
    with torch.inference_mode():
        inference = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), inference)


def test_an_adapter_beside_it_computes_in_the_models_dtype() -> None:
    """C37: peft reads the dtype of the weight it adapts; storage in 8 bits must not become the adapter's."""
    peft = pytest.importorskip("peft")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(32, 48, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.proj(x)
            return out

    def quantize(layer: nn.Linear) -> None:
        layer.weight = nn.Parameter(ScaledWeight.of(layer.weight, formats.FP8, "storage"), requires_grad=False)

    def adapted(before: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Model()
        if before:
            quantize(model.proj)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model)
        if not before:
            quantize(model.proj.base_layer)
        return model

    x = torch.randn(5, 32).bfloat16()
    first, second = adapted(True), adapted(False)
    for model in (first, second):
        assert model.proj.lora_A["default"].weight.dtype is not formats.FP8
        assert model.proj.lora_A["default"].weight.element_size() >= 2
    assert torch.equal(first(x), second(x)), "both orders agree"
    torch.manual_seed(0)
    exact = Model()
    exact.proj.to(torch.float32)
    branch = first.proj
    truth = (
        exact(x.float())
        + (x.float() @ branch.lora_A["default"].weight.float().t() @ branch.lora_B["default"].weight.float().t())
        * branch.scaling["default"]
    )
    assert ((first(x).float() - truth).norm() / truth.norm()) < 0.05
