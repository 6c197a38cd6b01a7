"""Random LoRAs for the tiny pipelines, in the form diffusers saves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diffaccel.core.wrappers import own_modules

LAYERS: dict[str, Sequence[str]] = {
    "flux": ("attn.to_q", "attn.to_v", "attn.add_k_proj", "ff.net.0.proj", "proj_mlp", "proj_out"),
    "wan": ("attn1.to_q", "attn1.to_out.0", "attn2.to_k", "ffn.net.2"),
    "sd3": ("attn.to_q", "attn.to_v", "ff.net.2"),
    "sdxl": ("attn1.to_q", "attn2.to_v", "ff.net.0.proj"),
}


def state_dict(
    pipe: Any, family: str, rank: int = 3, seed: int = 0, size: float = 0.3, component: str = ""
) -> dict[str, torch.Tensor]:
    """A LoRA over some layers of the denoiser's blocks."""
    generator = torch.Generator().manual_seed(seed)
    component = component or ("unet" if family == "sdxl" else "transformer")
    made = {}
    for name, module in own_modules(getattr(pipe, component)).items():
        if (
            isinstance(getattr(module, "in_features", None), int)
            and name.endswith(tuple(LAYERS[family]))
            and "block" in name
        ):
            down = torch.randn(rank, module.in_features, generator=generator) * size
            up = torch.randn(module.out_features, rank, generator=generator) * size
            made[f"{component}.{name}.lora_A.weight"], made[f"{component}.{name}.lora_B.weight"] = down, up
    assert made
    return made
