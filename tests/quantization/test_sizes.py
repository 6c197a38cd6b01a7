"""The sizes of published models in the docs are counted as our quantization really weighs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel

from benchmarks.quantized_sizes import RESULTS, sizes
from diffaccel import accelerate
from diffaccel.quantization.weights import weight_bytes
from tests import tiny

DOCS = Path(__file__).parents[2] / "docs" / "quantization.md"


@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_eight_bits_weigh_what_is_counted(family: str, method: str) -> None:
    pipe = tiny.build(family, dtype=torch.bfloat16)
    model = tiny.denoiser(pipe).to(torch.bfloat16)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    counted = sizes(model)
    assert weight_bytes(model) - buffers == counted["bf16_bytes"]
    accelerate(pipe, None, quantization=method, quantization_scheme="weight_only", strict=True)
    assert weight_bytes(tiny.denoiser(pipe)) - buffers == counted["8_bit_bytes"] < counted["bf16_bytes"]


def test_flux_keeps_a_third_of_its_weights_in_sixteen_bits() -> None:
    with torch.device("meta"):
        counted = sizes(FluxTransformer2DModel(guidance_embeds=True))
    assert counted == json.loads(RESULTS.read_text())["rows"]["FLUX.1-dev"]
    assert 0.63 < counted["8_bit_of_bf16"] < 0.65  # not the half that one layer has


def test_the_table_of_the_docs_says_what_was_counted() -> None:
    text = DOCS.read_text()
    for name, row in json.loads(RESULTS.read_text())["rows"].items():
        cells = [f"{row['bf16_bytes'] / 1e9:.1f} GB"]
        for kind in ("8_bit", "int4_rank_32"):
            cells.append(f"{row[f'{kind}_bytes'] / 1e9:.1f} GB, {row[f'{kind}_of_bf16']:.0%}".replace("%", " %"))
        assert f"| {name.removesuffix('-dev')} | {' | '.join(cells)} |" in text
