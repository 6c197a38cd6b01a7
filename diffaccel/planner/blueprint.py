"""A pipeline on meta, from configs alone: what a plan can be made for before any weight is loaded."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedModelError
from ..ledger.closed.shape import Config
from ..ledger.models import Model, resolve

if TYPE_CHECKING:
    from ..core.protocols import Pipeline

# Pipelines of the bundled models by the class of their denoiser; where models of one class have several, by name.
_PIPELINES: dict[str, str] = {
    "CogVideoXTransformer3DModel": "CogVideoXPipeline",
    "Flux2Transformer2DModel": "Flux2Pipeline",
    "FluxTransformer2DModel": "FluxPipeline",
    "HunyuanVideo15Transformer3DModel": "HunyuanVideo15Pipeline",
    "HunyuanVideoTransformer3DModel": "HunyuanVideoPipeline",
    "LTX2VideoTransformer3DModel": "LTX2Pipeline",
    "LTXVideoTransformer3DModel": "LTXPipeline",
    "MochiTransformer3DModel": "MochiPipeline",
    "PixArtTransformer2DModel": "PixArtSigmaPipeline",
    "QwenImageTransformer2DModel": "QwenImagePipeline",
    "SD3Transformer2DModel": "StableDiffusion3Pipeline",
    "UNet2DConditionModel": "StableDiffusionXLPipeline",
    "WanTransformer3DModel": "WanPipeline",
    "ZImageTransformer2DModel": "ZImagePipeline",
    "flux.2-klein-4b": "Flux2KleinPipeline",
    "flux.2-klein-9b": "Flux2KleinPipeline",
}
_SCHEDULERS = {
    "CogVideoXPipeline": "CogVideoXDDIMScheduler",
    "PixArtSigmaPipeline": "DPMSolverMultistepScheduler",
    "StableDiffusionXLPipeline": "EulerDiscreteScheduler",
    "WanPipeline": "UniPCMultistepScheduler",
}


def pipeline_of(model: str | Path | Model) -> tuple[Pipeline, str]:
    """(pipeline of a bundled model or of a folder of configs, all modules on meta in bf16; what it was made of).

    Tokenizers and guidance parts that no config describes are None; the scheduler has its class's defaults.
    """
    import diffusers

    found = resolve(model)
    name = _PIPELINES.get(found.name) or _PIPELINES.get(found.denoiser)
    if name is None:
        raise UnsupportedModelError(f"which pipeline {found.denoiser} belongs to is not known")
    kind = getattr(diffusers, name)
    scheduler = getattr(diffusers, _SCHEDULERS.get(name, "FlowMatchEulerDiscreteScheduler"))()
    part = "unet" if found.denoiser.startswith("UNet") else "transformer"
    made: dict[str, object] = {"scheduler": scheduler, "vae": _on_meta(found.vae, found.vae_config)}
    for number in range(found.experts):
        made[part + (f"_{number + 1}" if number else "")] = _on_meta(found.denoiser, found.config)
    for number, encoder in enumerate(found.encoders):
        made["text_encoder" + (f"_{number + 1}" if number else "")] = _encoder(encoder.kind, encoder.config)
    wanted = inspect.signature(kind.__init__).parameters
    empty = {key: None for key, row in wanted.items() if key != "self" and row.default is inspect.Parameter.empty}
    pipe: Pipeline = kind(**empty | {key: module for key, module in made.items() if key in wanted})
    return pipe, f"{found.name} ({found.origin}, no weights)"


def _on_meta(kind: str, config: Config) -> torch.nn.Module:
    import diffusers

    with torch.device("meta"):
        module: torch.nn.Module = getattr(diffusers, kind).from_config(dict(config))
    return torch.nn.Module.to(module, torch.bfloat16).eval()


def _encoder(kind: str, config: Config) -> torch.nn.Module:
    import transformers

    made = getattr(transformers, kind)
    with torch.device("meta"):
        module: torch.nn.Module = made(made.config_class(**config))
    return torch.nn.Module.to(module, torch.bfloat16).eval()
