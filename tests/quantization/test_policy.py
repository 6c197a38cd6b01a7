"""Which layers are quantized: by family, by option, by a budget; and that the reasons are printed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from diffaccel.errors import BudgetError, InvalidOptionError
from diffaccel.models import CARDS, ModelSpec, lookup
from diffaccel.quantization.policy import Policy, Selection, select, select_encoder
from diffaccel.quantization.sensitivity import LayerCost, keep_within, keeping, measure, output_error, table
from diffaccel.quantization.weights import ScaledWeight
from tests import tiny
from tests.models.families import table as families

# Of every family: how many layers are quantized in its tiny pipeline (counted by hand from the model's code: per block
# the projections of its attentions and the two or three layers of each feed-forward).
COUNTS = {
    "chroma": 2 * 12 + 2 * 5,
    "cogvideox": 3 * 6,
    "flux_cfg": 2 * 12 + 2 * 5,
    "flux2": 2 * 12 + 2 * 2,
    "hunyuan_video": 2 * 12 + 2 * 5,
    "hunyuan_video15": 3 * 12,
    "ltx": 3 * 10,
    "ltx2": 3 * 28,
    "mochi": 2 * 12 + 9,
    "pixart_alpha": 3 * 10,
    "qwen": 3 * 12,
    "sana": 3 * 8,
    "sd3": 2 * 12 + 9,
    "wan": 3 * 10,
    "z_image": 3 * 7,
}
FORBIDDEN = re.compile(r"norm|mod\.|_mod|modulation|embed|time|adaln|scale_shift|guidance", re.I)


@pytest.mark.parametrize("name", COUNTS)
def test_every_family(name: str) -> None:
    pipe = families.build(name)
    spec = lookup(pipe)
    model = getattr(pipe, spec.denoisers[0])
    chosen = select(model, spec)
    assert len(chosen.quantized) == COUNTS[name], str(chosen)
    lists = tuple(f"{row.attribute}." for row in spec.stack)
    for layer in chosen.quantized:
        assert isinstance(model.get_submodule(layer), nn.Linear) and layer.startswith(lists)
        assert not FORBIDDEN.search(layer), layer
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert set(chosen.quantized) | set(chosen.kept) == linears and not set(chosen.quantized) & set(chosen.kept)


def test_a_unet_and_its_convolutions() -> None:
    unet = tiny.build("sdxl").unet
    chosen = select(unet, CARDS["sdxl"])
    assert len(chosen.quantized) == 88 and all("time_emb_proj" in n for n in chosen.kept if n[:4] in ("down", "up_b"))
    wider = select(unet, CARDS["sdxl"], Policy(convs=True))
    assert set(chosen.quantized) < set(wider.quantized) and "conv_in" in wider.kept and "conv_out" in wider.kept


def test_nothing_is_chosen_without_known_blocks() -> None:
    assert select(tiny.build("flux").transformer, ModelSpec("unknown", (), ())).quantized == ()


@pytest.fixture(scope="module")
def flux() -> nn.Module:
    model: nn.Module = tiny.build("flux").transformer
    return model


def test_options(flux: nn.Module) -> None:
    spec = CARDS["flux"]
    plain = set(select(flux, spec).quantized)

    def kept_by(**options: object) -> set[str]:
        return plain - set(select(flux, spec, Policy(**options)).quantized)  # type: ignore[arg-type]

    blocks = len(flux.transformer_blocks)  # type: ignore[arg-type]
    assert kept_by(first_blocks=1) == {n for n in plain if n.startswith("transformer_blocks.0.")}
    last = f"single_transformer_blocks.{len(flux.single_transformer_blocks) - 1}."  # type: ignore[arg-type]
    assert kept_by(last_blocks=1) == {n for n in plain if n.startswith(last)}
    text = kept_by(last_text=True)
    assert len(text) == 6 and all(n.startswith(f"transformer_blocks.{blocks - 1}.") for n in text)
    assert kept_by(ff_out=True) == {n for n in plain if n.endswith(".net.2")}
    assert kept_by(keep=("to_q$",)) == {n for n in plain if n.endswith("to_q")}
    assert kept_by(multiple_of=64) == {
        n for n in plain if flux.get_submodule(n).in_features % 64 or flux.get_submodule(n).out_features % 64
    }


def test_the_reasons_are_printed(flux: nn.Module) -> None:
    chosen = select(flux, CARDS["flux"], Policy(keep=("to_q$",)))
    text = str(chosen)
    for word in ("layers quantized", "modulation of a norm", "x_embedder", "proj_out", "matches keep='to_q$'"):
        assert word in text
    assert chosen.summary().startswith(f"{len(chosen.quantized)} layers (kept: ")
    assert Selection(("a",), {}).summary() == "1 layers"


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"first_blocks": -1}, "first_blocks=-1"),
        ({"last_blocks": True}, "last_blocks=True"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"ff_out": 1}, "ff_out=1"),
        ({"keep": ("(",)}, "regular expression"),
    ],
)
def test_bad_options(options: dict[str, object], hint: str) -> None:
    with pytest.raises(InvalidOptionError, match=re.escape(hint)):
        Policy(**options)  # type: ignore[arg-type]


def test_text_encoders() -> None:
    pipe = tiny.build("sd3")
    for name, heads in (("text_encoder", {"text_projection"}), ("text_encoder_3", set())):
        encoder = getattr(pipe, name)
        chosen = select_encoder(encoder)
        linears = {n for n, m in encoder.named_modules() if isinstance(m, nn.Linear)}
        assert set(chosen.quantized) == linears - heads


def test_adapters_are_left_alone() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Module()])
    model.blocks[0].proj = nn.Module()
    model.blocks[0].proj.base_layer = nn.Linear(8, 8)
    model.blocks[0].proj.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2)})
    assert select(model, CARDS["wan"]).quantized == ("blocks.0.proj.base_layer",)


def test_the_error_of_a_layer_is_that_of_its_output() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(16, 32, generator=generator), torch.randn(9, 32, generator=generator)
    quantized = ScaledWeight.of(weight, torch.int8, "storage")
    truth = inputs @ weight.t()
    by_hand = (inputs @ quantized.dequantize().t() - truth).norm() / truth.norm()
    assert output_error(weight, quantized, inputs) == pytest.approx(float(by_hand), rel=1e-4)
    assert output_error(weight, weight, inputs) == 0
    assert output_error(torch.zeros(2, 32), torch.zeros(2, 32), inputs) == 0


def _int8(weight: torch.Tensor) -> torch.Tensor:
    return ScaledWeight.of(weight, torch.int8, "weight_only")


def test_a_calibration_sees_what_the_weights_alone_do_not() -> None:
    """A column that is large, and that the layer's input never uses: by its norm this weight loses little."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"good": nn.Linear(32, 32), "bad": nn.Linear(32, 32), "idle": nn.Linear(32, 32)})
    inputs = torch.randn(50, 32)
    inputs[:, 5] = 0
    with torch.no_grad():
        model["bad"].weight[:, 5] = 100.0
    by_weight = {
        n: float((_int8(m.weight).dequantize() - m.weight).norm() / m.weight.norm()) for n, m in model.items()
    }
    assert by_weight["bad"] < 0.01, "no worse than any"
    costs = measure(model, ("good", "bad", "idle"), _int8, lambda: model["bad"](model["good"](inputs) * 0 + inputs))
    by_name = {cost.name: cost for cost in costs}
    assert set(by_name) == {"good", "bad"}, "a layer that did not run has no cost"
    assert by_name["bad"].error > 0.3 > 0.02 > by_name["good"].error > 0
    assert by_name["good"].plain_bytes == 4096 and by_name["good"].quantized_bytes == 1024 + 128
    assert keep_within(costs, max_error=0.05) == ("bad",)
    assert not any(module._forward_pre_hooks for module in model.modules()), "the calibration leaves no hook"


def test_a_calibration_on_a_pipeline() -> None:
    pipe = tiny.build("flux")
    chosen = select(pipe.transformer, CARDS["flux"])
    costs = measure(
        pipe.transformer, chosen.quantized, _int8, lambda: tiny.run(pipe, "flux", num_inference_steps=1), rows=16
    )
    assert [cost.name for cost in costs] != [] and {cost.name for cost in costs} == set(chosen.quantized)
    assert all(0 < cost.error < 0.05 for cost in costs)
    text = table(costs, chosen)
    assert costs[0].name in text and "layers quantized" in text


COSTS = tuple(LayerCost(f"l.{i}", 100, 50, error) for i, error in enumerate((0.01, 0.4, 0.02, 0.3)))


def test_bytes_and_errors_buy_layers() -> None:
    assert keep_within(COSTS, max_bytes=300) == ("l.1", "l.3")
    assert keep_within(COSTS, max_bytes=250) == ("l.1",)
    assert keep_within(COSTS, max_bytes=200) == ()
    assert keep_within(COSTS, max_error=0.2) == ("l.1",), "sqrt((.3^2+.02^2+.01^2)/4) = .150"
    assert keep_within(COSTS, max_error=0.5) == ()
    assert keep_within(COSTS, max_error=0.0) == ("l.1", "l.3", "l.2", "l.0")
    assert set(keep_within(COSTS, max_bytes=10**9)) == {cost.name for cost in COSTS}
    with pytest.raises(BudgetError, match="200 bytes"):
        keep_within(COSTS, max_bytes=199)
    with pytest.raises(BudgetError, match=r"max_error=0\.1"):
        keep_within(COSTS, max_bytes=250, max_error=0.1)
    with pytest.raises(InvalidOptionError, match="max_bytes"):
        keep_within(COSTS)


def test_a_policy_that_keeps_what_was_chosen(flux: nn.Module) -> None:
    names = ("transformer_blocks.1.attn.to_q",)
    policy = keeping(Policy(), names)
    gone = set(select(flux, CARDS["flux"]).quantized) - set(select(flux, CARDS["flux"], policy).quantized)
    assert gone == set(names), "the name is taken literally: not to_q of other blocks"


@pytest.mark.parametrize("keep", [5, None, {"to_q": 1}])
def test_what_is_kept_is_said_in_regular_expressions(keep: object) -> None:
    with pytest.raises(InvalidOptionError, match=r"keep=.*must be a regular expression or a list of them"):
        Policy(keep=keep)  # type: ignore[arg-type]
