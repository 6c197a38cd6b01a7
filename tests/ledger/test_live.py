"""Counting modules themselves: equal to torch's own counter, to the closed form, and to counts that were kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffaccel import InvalidPipelineError, UnsupportedModelError, accelerate, restore
from diffaccel.ledger import estimate, from_pipeline
from diffaccel.ledger.closed.encoders import ENCODERS
from diffaccel.ledger.live.inputs import INPUTS, Call
from diffaccel.ledger.live.memory import PeakMemory
from diffaccel.ledger.live.meter import Meter
from diffaccel.ledger.models import bundled, names
from tests import tiny

FACTS = json.loads((Path(__file__).parents[1] / "data" / "ledger_facts.json").read_text())["models"]
QUICK = {"flux.2-klein-4b", "sdxl"}


def on_meta(name: str) -> Any:
    """A pipeline of a bundled model's denoiser and autoencoder; nothing is allocated."""
    model = bundled(name)
    with torch.device("meta"):
        denoiser = getattr(diffusers, model.denoiser)(**model.config)
        vae = getattr(diffusers, model.vae)(**model.vae_config)
    return SimpleNamespace(transformer=denoiser, vae=vae)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names()]
)
def test_modules_on_meta_and_the_closed_form_agree(name: str) -> None:
    shape = FACTS[name]["shapes"][0]
    asked = {key: shape[key] for key in ("height", "width", "frames", "text_tokens")}
    ours, closed = from_pipeline(on_meta(name), **asked), estimate(name, **asked)
    assert ours.flops.forward == closed.flops.forward
    assert ours.flops.decode == closed.flops.decode == shape["decode"]
    assert (ours.tokens, ours.image_tokens, ours.notes) == (closed.tokens, closed.image_tokens, ())
    assert ours.params["transformer"] == FACTS[name]["params"]["transformer"]
    assert ours.params["vae"] == FACTS[name]["params"]["vae"]
    assert (ours.activation_bytes, ours.vae_peak_bytes) == (shape["activation_bytes"], shape["vae_peak_bytes"])


@pytest.mark.parametrize("family", ["flux", "wan", "sd3", "sdxl"])
def test_a_pipeline_with_weights_counts_as_torch_counts(family: str) -> None:
    """torch's counter on meta, with the same inputs; attention is seen there, as products."""
    pipe = tiny.build(family)
    before = {k: (v.data_ptr(), v._version) for k, v in tiny.denoiser(pipe).state_dict().items()}
    side = 16 if family == "sd3" else 64
    book = from_pipeline(pipe, height=side, width=side, frames=9 if family == "wan" else None, text_tokens=16)
    kind = type(tiny.denoiser(pipe)).__name__
    with torch.device("meta"):
        copy = type(tiny.denoiser(pipe)).from_config(tiny.denoiser(pipe).config)
    latents = _latents(pipe, book)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        copy(**INPUTS[kind](copy.config, Call(*latents, (16,), dtype=torch.float32)))
    assert book.flops.forward.total == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert book.params["transformer"] == sum(p.numel() for p in tiny.denoiser(pipe).parameters())
    assert book.flops.decode and book.flops.encode and book.attention_share > 0
    assert {k: (v.data_ptr(), v._version) for k, v in tiny.denoiser(pipe).state_dict().items()} == before


def _latents(pipe: Any, book: Any) -> tuple[int, int, int]:
    from diffaccel.ledger.arithmetic import latents_of
    from diffaccel.ledger.live.counting import describe

    part = "unet" if hasattr(pipe, "unet") else "transformer"
    z = latents_of(describe(pipe, part, tiny.denoiser(pipe)), book.request)
    return z.frames, z.rows, z.columns


def test_text_encoders_count_as_the_closed_form() -> None:
    """On real weights: linear layers, products of attention and their parameters."""
    pipe = tiny.build("flux")
    for module in (pipe.text_encoder, pipe.text_encoder_2):
        closed = ENCODERS[type(module).__name__](module.config.to_dict(), 16)
        with torch.no_grad(), Meter(module) as meter:
            module(input_ids=torch.zeros(1, 16, dtype=torch.int64))
        assert (closed.linear_flops, closed.attention_flops) == (meter.counts.linear, meter.counts.attention)
        assert closed.parameters == sum(p.numel() for p in module.parameters())


def test_quantized_layers_count_as_their_shapes() -> None:
    """A pipeline under FP8 costs what the plain one does, and its layers are still known by their shapes."""
    pipe = tiny.build("flux", dtype=torch.bfloat16)
    plain = from_pipeline(pipe, 64, 64)
    accelerate(pipe, preset=None, quantization="fp8")
    assert from_pipeline(pipe, 64, 64) == plain
    restore(pipe)


class Packed(torch.nn.Module):
    """A layer that keeps its weights in a form of its own, as GGUF and 4-bit layers do."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inner, outer
        self.packed = torch.nn.Parameter(torch.zeros(outer, inner // 2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.packed, self.packed], dim=1).t()


def test_a_packed_layer_counts_once_and_by_its_shape() -> None:
    model = torch.nn.Sequential(Packed(8, 6), torch.nn.Linear(6, 4))
    with torch.no_grad(), Meter(model) as meter:
        model(torch.zeros(2, 5, 8))
    assert meter.counts.linear == 2 * 10 * (8 * 6 + 6 * 4) and meter.counts.attention == 0
    assert meter.counts.weights_by_rows == {10: 8 * 6 + 6 * 4}
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


def test_the_meter_counts_what_torch_counts() -> None:
    """Convolutions with groups, transposed ones, products and attention, on real numbers."""
    q = torch.zeros(2, 3, 7, 4)
    ops = [
        lambda: torch.nn.Conv2d(8, 12, 3, padding=1, groups=4)(torch.zeros(1, 8, 6, 6)),
        lambda: torch.nn.ConvTranspose2d(8, 6, 2, stride=2)(torch.zeros(1, 8, 5, 5)),
        lambda: torch.zeros(2, 3, 4) @ torch.zeros(2, 4, 5),
        lambda: torch.baddbmm(torch.zeros(2, 3, 5), torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)),
    ]
    for op in ops:
        with torch.no_grad(), Meter() as meter, FlopCounterMode(display=False) as counter:
            op()
        assert meter.counts.total == counter.get_total_flops() > 0
    with Meter() as meter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert meter.counts.attention == 4 * 2 * 3 * 7 * 7 * 4 and meter.counts.sequences == {(7, 7): 1}


def test_peaks_follow_what_is_alive() -> None:
    given = torch.empty(10, 100, device="meta")
    with PeakMemory([given]) as peak:
        large = given.repeat(10, 1)
        view = large.view(-1)
        del large
        assert peak.live_bytes == 4 * (1000 + 10000)
        del view
        given + 1
    assert peak.live_bytes == 4 * 1000 and peak.peak_bytes == 4 * 11000


def test_a_pipeline_that_is_not_as_its_config_says() -> None:
    pipe = tiny.build("flux")
    del pipe.transformer.transformer_blocks[1]
    [note] = from_pipeline(pipe, 64, 64).notes
    assert "layers differ from the config, such as transformer_blocks.1." in note


def test_refusals() -> None:
    with pytest.raises(InvalidPipelineError, match="SimpleNamespace has no transformer or unet"):
        from_pipeline(SimpleNamespace())
    with torch.device("meta"):
        strange = diffusers.DiTTransformer2DModel(num_layers=1, num_attention_heads=2, attention_head_dim=8)
    with pytest.raises(UnsupportedModelError, match="inputs of the transformer 'DiTTransformer2DModel' are not known"):
        from_pipeline(SimpleNamespace(transformer=strange))
