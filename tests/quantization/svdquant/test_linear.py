"""The layer: equal to the reference, undone without a trace, extra branches that come and go, casts, peft."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from diffaccel.errors import IncompatibleError, InvalidOptionError
from diffaccel.quantization.svdquant import nunchaku_run
from diffaccel.quantization.svdquant.linear import SvdQuantLinear, install, refusal, uninstall
from diffaccel.quantization.svdquant.math import (
    Layer,
    Recipe,
    corrected_bias,
    effective_weight,
    quantize_layer,
    reference_forward,
)
from tests.quantization.svdquant.kernel_stand_in import StandIn

SPLITS = {"one": (), "gelu": ((200, True),), "two": ((64, False), (136, True))}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(bias: bool = True) -> nn.Linear:
    made = nn.Linear(200, 48, bias=bias)
    made.weight.data.copy_(draw(48, 200, seed=1) / 10)
    if bias:
        made.bias.data.copy_(draw(48, seed=2))
    return made


def quantized(precision: str = "int4", splits: str = "one", bias: bool = True) -> tuple[nn.Linear, Layer]:
    plain, x = linear(bias), draw(60, 200, seed=3)
    recipe = Recipe(precision, rank=8, alpha=(0.5,))
    layer, _ = quantize_layer(
        plain.weight.data,
        None if plain.bias is None else plain.bias.data,
        recipe,
        x.abs().amax(0),
        None,
        SPLITS[splits],
    )
    return plain, layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", list(SPLITS))
@pytest.mark.parametrize("precision", ["int4", "nvfp4"])
def test_torch_is_the_reference(precision, splits, bias):
    module, layer = quantized(precision, splits, bias)
    install(module, layer)
    x = draw(2, 5, 200, seed=4)
    with torch.no_grad():
        torch.testing.assert_close(module(x), reference_forward(x, layer), rtol=1e-5, atol=1e-5)
        half = module.to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert float((half - reference_forward(x, layer)).norm() / half.float().norm()) < 0.06  # codes at ties may differ
    torch.testing.assert_close(effective_weight(module.layer()), effective_weight(layer))


def test_undo_leaves_no_trace():
    module, layer = quantized()
    module.weight.requires_grad_(False)
    before, weight, bias = dict(vars(module)), module.weight, module.bias
    tables = {k: dict(v) for k, v in before.items() if isinstance(v, dict)}
    saved = install(module, layer)
    assert isinstance(module, SvdQuantLinear) and isinstance(module, nn.Linear)
    assert "weight" not in module.state_dict() and module.qweight.dtype == torch.uint8
    assert (module.weight.shape, module.weight.dtype) == (weight.shape, weight.dtype)
    for use in (lambda: module.weight + 1, lambda: module.weight.data.add_(1), lambda: module.weight.detach()):
        with pytest.raises(IncompatibleError, match="there is none"):
            use()
    with pytest.raises((AttributeError, KeyError)):
        module.weight = nn.Parameter(weight)
    uninstall(module, saved, weight)
    assert type(module) is nn.Linear and module.weight is weight and module.bias is bias
    assert list(vars(module)) == list(before)
    assert {k: dict(v) for k, v in vars(module).items() if isinstance(v, dict)} == tables
    assert list(module.state_dict()) == ["weight", "bias"]


def test_undo_follows_a_cast_and_a_cast_changes_no_code():
    module, layer = quantized("nvfp4", "two")
    x, weight = draw(3, 200), module.weight
    saved = install(module, layer)
    state = {k: v.clone() for k, v in module.state_dict().items() if k != "bias"}
    module.to(torch.float16).to(torch.float32)
    for name, tensor in module.state_dict().items():
        if name != "bias":
            assert torch.equal(tensor, state[name]), name
    module.to(torch.float16)
    assert module(x.half()).dtype == torch.float16
    uninstall(module, saved, weight)
    assert module.weight is weight and module.weight.dtype == module.bias.dtype == torch.float16


@pytest.mark.parametrize("splits", ["one", "two"])
def test_extra_branches_add_and_leave_exactly(splits):
    module, layer = quantized(splits=splits)
    install(module, layer)
    x = draw(4, 200, seed=5)
    down, up, other = draw(6, 200, seed=6) / 10, draw(48, 6, seed=7) / 10, draw(3, 200, seed=8)
    with torch.no_grad():
        plain = module(x)
        bits = {k: v.clone() for k, v in module.state_dict().items()}
        module.with_extra_branch("a", down, up, 0.5).with_extra_branch("b", other, draw(48, 3, seed=9))
        assert {n: (b.rank, b.strength) for n, b in module.branches.items()} == {"a": (6, 0.5), "b": (3, 1.0)}
        module.set_branch_strength("a", 2.0).set_branch_strength("a", 0.25).without_extra_branch("b")
        branch = 0.25 * (x @ down.T) @ up.T  # in the model's float32
        torch.testing.assert_close(module(x), plain + branch, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(module.dense_weight(), effective_weight(layer) + 0.25 * up @ down)
        module.with_extra_branch("a", down, up, 1.0)  # in place of the old one
        assert module.branches["a"].rank == 6 and len(module.proj_down) == module.svdq.base_rank
        module.without_extra_branch("a").without_extra_branch("never there")
        assert torch.equal(module(x), plain)
    after = module.state_dict()
    assert list(after) == list(bits) and all(torch.equal(after[k], bits[k]) for k in bits)


def test_branches_of_a_wrong_shape_or_name_are_errors():
    module, layer = quantized()
    install(module, layer)
    with pytest.raises(InvalidOptionError, match=r"\(4, 199\)"):
        module.with_extra_branch("a", draw(4, 199), draw(48, 4))
    with pytest.raises(InvalidOptionError, match="no extra branch 'b'"):
        module.set_branch_strength("b", 1.0)
    assert not module.branches


def test_copies_are_independent():
    module, layer = quantized()
    install(module, layer)
    twin = copy.deepcopy(module)
    twin.with_extra_branch("a", draw(2, 200), draw(48, 2))
    x = draw(3, 200)
    assert not module.branches and torch.equal(module(x), copy.deepcopy(module)(x))
    assert not torch.equal(twin(x), module(x))


def test_what_cannot_be_quantized_says_why():
    module, layer = quantized()
    assert "Conv2d" in refusal(nn.Conv2d(1, 1, 1))
    hooked = linear()
    hooked.forward = hooked.forward
    assert "hook" in refusal(hooked)
    with torch.device("meta"):
        assert "memory" in refusal(nn.Linear(2, 2))
    with pytest.raises(IncompatibleError, match="48x200"):
        install(nn.Linear(10, 48), layer)
    install(module, layer)
    with pytest.raises(IncompatibleError, match="SvdQuantLinear"):
        install(module, layer)


def test_peft_puts_an_adapter_beside_the_layer_and_cannot_merge_into_it():
    peft = pytest.importorskip("peft")
    module, layer = quantized()
    install(module, layer)
    model = nn.Sequential(module)
    x = draw(3, 200)
    with torch.no_grad():
        plain = module(x)
        adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["0"]), model)
        lora = adapted[0]
        lora.lora_B["default"].weight.copy_(draw(48, 4) / 10)
        delta = x @ lora.lora_A["default"].weight.T @ lora.lora_B["default"].weight.T * lora.scaling["default"]
        torch.testing.assert_close(adapted(x), plain + delta)
        assert float(delta.abs().max()) > 0.01
        with pytest.raises(IncompatibleError, match="not into it"):
            lora.merge()


@pytest.mark.parametrize("splits", list(SPLITS))
@pytest.mark.parametrize("precision", ["int4", "nvfp4"])
def test_the_calls_of_nunchakus_kernels(precision, splits):
    """With a stand-in for the kernels; parts after a GELU are then quantized with signs."""
    module, layer = quantized(precision, splits)
    install(module, layer)
    x = draw(2, 3, 200, seed=4).bfloat16()
    down, up = draw(5, 200, seed=6) / 10, draw(48, 5, seed=7) / 10
    signed = tuple(type(p)(p.codes, p.smooth, p.down, p.up) for p in layer.parts)
    bias = layer.bias + (draw(48, seed=2) - corrected_bias(draw(48, seed=2), layer.parts))
    wanted = reference_forward(x.float(), Layer(signed, bias))
    with torch.no_grad():
        found = nunchaku_run.run_nunchaku(module, x, StandIn())
        assert float((found - wanted).norm() / wanted.norm()) < 0.01
        assert module.svdq.kernel_layout and module.qweight.dtype == torch.int8
        torch.testing.assert_close(effective_weight(module.layer()), effective_weight(layer))
        module.with_extra_branch("a", down, up, 0.5)
        wanted = wanted + 0.5 * (x.float() @ down.T) @ up.T
        found = nunchaku_run.run_nunchaku(module, x, StandIn())
        assert float((found - wanted).norm() / wanted.norm()) < 0.012
