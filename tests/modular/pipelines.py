"""Tiny modular pipelines beside their classic twins of the same weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import tiny
from tests.models.families import table

STEPS = 6


@dataclass(frozen=True)
class Twins:
    """A classic tiny pipeline (of `tests.tiny`, or of the table of families) and the class of its modular form.

    Attributes:
        prompts: whether both take prompts; else the text encoder is left out, and calls bring embeddings.
        guidance: what the guider is set to, where there is one.
        more: further arguments of both calls.
        branches: of the modular form, as reports name them.
        equal: do both compute the same, bit by bit?
        denoisers: the components that are.
    """

    classic: str
    modular: str
    prompts: bool = False
    guidance: float | None = None
    more: dict[str, Any] = field(default_factory=dict)
    branches: tuple[str, ...] = ("cond", "uncond")
    equal: bool = True
    denoisers: tuple[str, ...] = ("transformer",)


PRED = ("pred_cond", "pred_uncond")  # by contexts of the cache that the pipeline opens
TWINS: dict[str, Twins] = {
    "flux": Twins("flux", "FluxModularPipeline", True, branches=("cond",)),
    "wan": Twins("wan", "WanModularPipeline", guidance=4.0),
    "wan22": Twins("wan22", "Wan22ModularPipeline", guidance=4.0, denoisers=("transformer", "transformer_2")),
    "qwen": Twins("qwen", "QwenImageModularPipeline", guidance=3.0),
    "hunyuan_video15": Twins("hunyuan_video15", "HunyuanVideo15ModularPipeline", branches=PRED, equal=False),
    "sd3": Twins("sd3", "StableDiffusion3ModularPipeline", True, 4.0, equal=False),
    "sdxl": Twins("sdxl", "StableDiffusionXLModularPipeline", True, 4.0, equal=False, denoisers=("unet",)),
    "z_image": Twins(
        "z_image", "ZImageModularPipeline", more={"height": 16, "width": 16}, branches=("cond",), equal=False
    ),
    "ltx": Twins("ltx", "LTXModularPipeline", False, 3.0, branches=PRED, equal=False),
}
GUIDANCE = ("guidance_scale", "true_cfg_scale", "true_cfg")  # which a guider has instead


def quiet(make: Callable[[], Any]) -> Any:
    """Without diffusers' words about guiders."""
    logging.disable(logging.WARNING)
    try:
        return make()
    finally:
        logging.disable(logging.NOTSET)


def empty(name: str) -> Any:
    """The modular pipeline, with no weights loaded."""
    import diffusers

    def make() -> Any:
        blocks = getattr(diffusers, TWINS[name].modular)().blocks
        if not TWINS[name].prompts:
            blocks.sub_blocks.pop("text_encoder")
        return blocks.init_pipeline()

    return quiet(make)


def components(name: str, pipe: Any, classic: Any) -> dict[str, Any]:
    """What of the classic pipeline the modular one takes, its guider, and what is in its config."""
    found = {k: v for k, v in classic.components.items() if k in pipe._component_specs and v is not None}
    found |= {k: classic.config[k] for k in pipe._config_specs if k in classic.config}
    guidance = TWINS[name].guidance
    for guider in ("guider", "guider_2"):
        if guidance is not None and guider in pipe._component_specs:
            found[guider] = getattr(pipe, guider).new(guidance_scale=guidance)
    return found


def classic_of(name: str) -> Any:
    """The classic twin."""
    return (tiny if TWINS[name].prompts else table).build(TWINS[name].classic)


def build(name: str) -> Any:
    """The modular form, with weights and scheduler of its own."""
    pipe = empty(name)
    quiet(lambda: pipe.update_components(**components(name, pipe, classic_of(name))))
    return pipe


def _call(name: str) -> dict[str, Any]:
    twins = TWINS[name]
    given = tiny.call_kwargs(twins.classic) if twins.prompts else table.FAMILIES[twins.classic].call()
    more = {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0), "output_type": "pt"}
    return given | twins.more | more


def run_classic(pipe: Any, name: str) -> torch.Tensor:
    """Pictures of one call."""
    return tiny.output(pipe(**_call(name)))


def run(pipe: Any, name: str, **more: Any) -> torch.Tensor:
    """Pictures of one call."""
    known = pipe.default_call_parameters
    given = {k: v for k, v in _call(name).items() if k in known and (k not in GUIDANCE or name == "flux")}
    output = next(one.name for one in pipe._blocks.outputs if one.name in ("images", "videos"))
    return tiny.output(pipe(**given | {"output": output} | more))
