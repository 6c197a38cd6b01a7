"""Libraries that quantize: their names, and layers that keep or replace what they compute with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from diffaccel import accelerate, plan, restore
from tests import tiny
from tests.loaded import quantizers
from tests.loaded.state import changes, state_of
from tests.offload.offloads import blocks_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def offloaded(pipe: Any, kind: str, folder: Path) -> Any:
    layers = {"offload_resident_layers": 1} if kind == "layerwise" else {}
    where = {"offload_store": "disk", "offload_folder": str(folder)}
    return accelerate(pipe, None, strict=True, offload=kind, **where, **layers)


NAMED = {
    "AutoRound": "auto-round",
    "Black Forest Labs' own format (bfl)": "bfl",
    "NVIDIA ModelOpt": "modelopt",
    "SDNQ": "sdnq",
    "nunchaku-lite": "nunchaku_lite",
    "something new": "something new",
}


@pytest.mark.parametrize("words", NAMED)
def test_a_quantizer_is_named(words: str) -> None:
    """As diffusers leaves it on a model: no layer needs to be known."""
    pipe = tiny.build("flux")
    assert plan(pipe, None, quantization="fp8").item("quantization.fp8").status == "enabled"
    pipe.transformer.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method=NAMED[words]))
    for name in ("fp8", "svdquant"):
        item = plan(pipe, None, quantization=name).item(f"quantization.{name}")
        assert item.status == "refused" and f"quantized already, by {words}:" in item.reason


def test_the_names_are_those_of_diffusers() -> None:
    from diffaccel.models.quantizers import METHODS

    assert set(METHODS) == {method.value for method in diffusers.quantizers.quantization_config.QuantizationMethod}


class Packed(torch.nn.Parameter):
    """A weight whose layer puts it into another form at its first call."""


class Packing(torch.nn.Linear):
    """As bitsandbytes' 4-bit layer on some processors: from its first call on the weight is another tensor, in another
    shape, and only the layer knows."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.bias, self.packed = plain.bias, False
        self.weight = Packed(plain.weight.detach().clone(), requires_grad=False)
        self.add = torch.nn.Parameter(torch.zeros(32, 1), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            self.weight.data = self.weight.data.T.flatten().clone() * 2
            self.add = torch.nn.Parameter(self.add.data.T, requires_grad=False)  # another object in the same memory
            self.packed = True
        assert not self.add.any()
        weight = self.weight.data.view(self.in_features, self.out_features).T / 2
        return torch.nn.functional.linear(input, weight, self.bias)


@pytest.mark.parametrize("kind", ["layerwise", "stage"])
def test_a_layer_may_replace_its_weight_while_it_computes(kind: str, tmp_path: Path) -> None:
    def build() -> Any:
        pipe = tiny.build("flux")
        for block in tiny.blocks(pipe.transformer):
            block.attn.to_q = Packing(block.attn.to_q)
        return pipe

    plain = tiny.run(build(), "flux")
    pipe = offloaded(build(), kind, tmp_path)
    assert tiny.run(pipe, "flux").equal(plain) and tiny.run(pipe, "flux").equal(plain)
    for block in blocks_of(pipe):  # and once more, as a save would have it
        layer = block.attn.to_q
        layer.weight.data = (layer.weight.data.view(32, 32).T / 2).contiguous()
        layer.packed = False
    assert tiny.run(pipe, "flux").equal(plain)
    assert tiny.run(restore(pipe), "flux").equal(plain)


class Keeping(torch.nn.Parameter):
    """A weight with a tensor that nobody here knows of."""


@pytest.mark.parametrize("kind", ["layerwise", "stage"])
def test_state_that_is_not_known_is_refused_by_its_name(kind: str) -> None:
    pipe = tiny.build("flux")
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    layer.weight = Keeping(layer.weight.detach(), requires_grad=False)
    layer.weight.sizes, layer.weight.kind = (torch.Size([2, 3]), ("a", 1)), torch.int8  # constants may be kept
    item = plan(pipe, None, offload=kind, offload_store="disk").item(f"offload.{kind}")
    assert item.status == "enabled"
    layer.weight.scales = torch.ones(3)
    item = plan(pipe, None, offload=kind, offload_store="disk").item(f"offload.{kind}")
    assert item.status == "refused" and "a Keeping keeps part of its state outside of its data (scales)" in item.reason


@pytest.mark.slow
def test_a_text_encoder_in_8_bits_takes_turns(tmp_path: Path) -> None:
    """As transformers loads it; what is kept of its outputs depends on the scales, too."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig, T5EncoderModel

    from diffaccel.offload.stage.text_cache import content

    pipe = tiny.build("flux")
    pipe.text_encoder_2.save_pretrained(tmp_path / "t5")
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    encoder = T5EncoderModel.from_pretrained(tmp_path / "t5", dtype=torch.float32, **options).eval()
    pipe.text_encoder_2 = encoder
    plain = tiny.run(pipe, "flux")
    layer = encoder.encoder.block[0].layer[0].SelfAttention.q
    assert type(layer).__name__ == "Linear8bitLt"
    offloaded(pipe, "stage", tmp_path)
    assert tiny.run(pipe, "flux").equal(plain) and in_a_file(layer.state.SCB, tmp_path)
    assert tiny.run(restore(pipe), "flux").equal(plain)
    before = content(encoder)
    layer.state.SCB *= 2
    assert content(encoder) != before


@linux
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layerwise", "stage"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("called", [True, False])
def test_codes_and_scales_of_bitsandbytes_move_with_the_weight(
    bits: int, kind: str, called: bool, tmp_path: Path
) -> None:
    """Before the first call of a layer and after it, when codes and scales lie somewhere else; and around a save,
    after which 4-bit layers pack their weights anew (which alone changes the last bits of a picture)."""
    pytest.importorskip("bitsandbytes")
    twin, pipe = quantizers.bitsandbytes(bits), quantizers.bitsandbytes(bits)
    plain = tiny.run(twin, "flux")
    if called:
        tiny.run(pipe, "flux")
    before = state_of(pipe)
    offloaded(pipe, kind, tmp_path)
    assert tiny.run(pipe, "flux").equal(plain)
    layer = pipe.transformer.transformer_blocks[1].attn.to_q
    assert all(in_a_file(tensor, tmp_path) for tensor in held(layer))
    for one in (twin, pipe):
        one.transformer.save_pretrained(tmp_path / "saved")
    again = tiny.run(twin, "flux")
    assert tiny.run(pipe, "flux").equal(again) and tiny.run(pipe, "flux").equal(again)
    assert tiny.run(restore(pipe), "flux").equal(again)
    if called and bits == 8:
        assert changes(before, state_of(pipe)) == []
    assert not any(in_a_file(tensor, tmp_path) for tensor in held(layer))


def held(layer: Any) -> list[torch.Tensor]:
    """What a layer of bitsandbytes computes with."""
    if hasattr(layer, "state"):
        return [layer.weight, layer.state.CB, layer.state.SCB]
    return [layer.weight, layer.weight.quant_state.absmax]


def in_a_file(tensor: torch.Tensor, folder: Path) -> bool:
    """Does it lie in a file of this folder, as the system's table of mappings has it?"""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [tuple(int(end, 16) for end in row[0].split("-")) for row in rows]
    return any(low <= tensor.data_ptr() < high for low, high in ranges)
