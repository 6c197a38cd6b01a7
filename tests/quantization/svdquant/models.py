"""Small FLUX models and quantized layers for the tests of files."""

from __future__ import annotations

from typing import Any

import torch

from diffaccel.models.registry import CARDS
from diffaccel.quantization.svdquant.calibration import Collector
from diffaccel.quantization.svdquant.jobs import jobs, quantize_job
from diffaccel.quantization.svdquant.math import Layer, Recipe

SPEC = CARDS["flux"]


def flux(heads: int = 2) -> Any:
    """One double and one single block, `heads` of 64 channels."""
    from diffusers import FluxTransformer2DModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FluxTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=64,
            num_attention_heads=heads, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(16, 24, 24),
        ).eval()  # fmt: skip


def call(seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of one forward."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return {
        "hidden_states": torch.randn(1, 16, 16, generator=draw),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=draw),
        "pooled_projections": torch.randn(1, 32, generator=draw),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(8, 3),
    }


def quantized(model: Any, layout: str, precision: str = "int4", rank: int = 24) -> dict[str, Layer]:
    """All layers of the model, calibrated on one call."""
    found, selection = jobs(model, SPEC, None, layout)
    collector = Collector({name: model.get_submodule(name) for name in selection.quantized}, 2**24)
    with collector.watching(), torch.no_grad():
        model(**call())
    layers: dict[str, Layer] = {}
    for job in found:
        made, _ = quantize_job(model, job, Recipe(precision, rank, (0.5,)), collector.seen[job.names[0]])
        layers |= made
    return layers
