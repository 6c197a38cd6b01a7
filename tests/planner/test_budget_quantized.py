"""F3: a memory budget judges the weights as they will be, after the quantization that is wished for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import Budget, BudgetError, accelerate, plan
from diffaccel.ledger.hardware import GIB
from diffaccel.quantization.weights import weight_bytes
from tests import tiny


def big() -> Any:
    """A FLUX pipeline whose denoiser outweighs the rest."""
    from diffusers import FluxTransformer2DModel

    pipe = tiny.build("flux", dtype=torch.bfloat16)
    torch.manual_seed(0)
    pipe.transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=4, num_single_layers=4, attention_head_dim=64,
        num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    ).eval().to(torch.bfloat16)  # fmt: skip
    return pipe


def total(pipe: Any) -> int:
    return sum(weight_bytes(module) for _, module in tiny.component_modules(pipe))


WISHES = [
    {"quantization": "int8", "compile": False},
    {"quantization": "fp8"},
    {"quantization": "svdquant", "quantization_rank": 16},
]


@pytest.mark.parametrize("wishes", WISHES, ids=lambda w: str(w["quantization"]))
def test_a_budget_that_only_the_quantized_weights_meet(wishes: dict[str, Any]) -> None:
    before = total(big())
    quantized = accelerate(big(), None, strict=True, **wishes)
    after = total(quantized)
    assert after < 0.8 * before
    limit = Budget(memory_gib=(after + 0.4 * (before - after)) / GIB)
    with pytest.raises(BudgetError, match="the weights alone take"):
        plan(big(), None, budget=limit)
    made = plan(big(), None, budget=limit, **wishes)
    assert list(made.enabled) == [f"quantization.{wishes['quantization']}"]
    pipe = accelerate(big(), None, budget=limit, strict=True, **wishes)
    pipe.enable_first_block_cache()  # decided again, with quantized weights in place
    assert len(pipe.acceleration.plan.enabled) == 2
    with pytest.raises(BudgetError, match="the weights alone take"):
        plan(big(), None, budget=Budget(memory_gib=0.9 * after / GIB), **wishes)
    with pytest.raises(BudgetError):
        plan(big(), None, budget=Budget(memory_gib=limit.memory_gib, fidelity="exact"), **wishes)


@pytest.mark.parametrize("offload", ["stage", "layerwise"])
def test_offload_is_judged_by_quantized_sizes(offload: str) -> None:
    """A limit between the peaks with and without quantization."""
    options = {"offload": offload, "offload_store": "disk"}
    peaks = []
    for wishes in ({}, WISHES[1]):
        low, high = 0, total(big())
        while high - low > 0.02 * total(big()):
            middle = (low + high) // 2
            try:
                plan(big(), None, budget=Budget(memory_gib=middle / GIB), **options, **wishes)
                high = middle
            except BudgetError:
                low = middle
        peaks.append(high)
    assert peaks[1] < 0.85 * peaks[0]
    pipe = accelerate(big(), None, strict=True, budget=Budget(memory_gib=peaks[1] / GIB), **options, **WISHES[1])
    if offload == "stage":
        tiny.run(pipe, "flux", num_inference_steps=1)
        stats = pipe.acceleration.report.stats["offload.stage"]
        assert max(stats[f"{moment}_peak_bytes"] for moment in ("encode", "denoise", "decode")) <= 1.03 * peaks[1]
