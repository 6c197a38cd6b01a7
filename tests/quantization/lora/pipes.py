"""Tiny pipelines, with and without text encoders, and what diffusers makes of a LoRA on them."""

from __future__ import annotations

from typing import Any

import torch

from tests import tiny
from tests.models.families import table

State = dict[str, torch.Tensor]
STEPS = {"mochi": 2, "wan22": 2}  # (no sigma is left for one step; the second expert has the second step)


def build(family: str, **more: Any) -> Any:
    """A tiny pipeline, with text encoders where there is one."""
    if family == "sd15":
        return _sd15()
    return tiny.build(family, **more) if family in tiny.FAMILIES else table.build(family)


def run(pipe: Any, family: str, **more: Any) -> torch.Tensor:
    """One step to latents, or as many as the family needs."""
    more = {"num_inference_steps": STEPS.get(family, 1), "output_type": "latent"} | more
    if family == "sd15":
        return tiny.output(pipe(**{**tiny.call_kwargs("sdxl"), **more}))
    if family in tiny.FAMILIES:
        return tiny.run(pipe, family, **more)
    return torch.cat([part.flatten() for part in table.run(pipe, family, **more)])


def copied(state: State) -> State:
    """Tensors that nobody else holds: some of diffusers' converters scale them in place."""
    return {key: value.clone() for key, value in state.items()}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, of the output's maximum."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def peft_layers(pipe: Any) -> list[Any]:
    """The layers that peft has put adapters on."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = [m for _, part in tiny.component_modules(pipe) for m in part.modules()]
    return [m for m in modules if isinstance(m, BaseTunerLayer)]


def fused(pipe: Any, family: str) -> torch.Tensor:
    """The output with the weights that peft adds up."""
    for layer in peft_layers(pipe):
        layer.merge()
    return run(pipe, family)


def _sd15() -> Any:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    sdxl = tiny.build("sdxl")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        unet = UNet2DConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            cross_attention_dim=32,
            norm_num_groups=8,
        ).eval()
    parts = sdxl.vae, sdxl.text_encoder, sdxl.tokenizer, unet, sdxl.scheduler
    pipe = StableDiffusionPipeline(*parts, None, None, None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe
