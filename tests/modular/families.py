"""Tiny modular pipelines that have no classic twin here: the loop of each family, from its real blocks.

Text encoders and decoders are left out: a call brings embeddings and gets latents. The denoiser, its scheduler, its
guiders and every block from the noise to the last step are diffusers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests import tiny
from tests.models.families.parts import TOKENS, embeds, flow
from tests.modular import parts
from tests.modular.parts import STEPS
from tests.modular.pipelines import quiet


@dataclass(frozen=True)
class Family:
    """A modular pipeline with nothing but what its loop needs.

    Attributes:
        modular: the class.
        parts: makes its components (guiders and small processors come from their config).
        call: arguments of one call.
        branches: of a step, as reports name them.
        keep: its top blocks that are kept.
        output: what is compared; a tensor, or a list of tensors.
        loops: how often a run sets the scheduler's timesteps.
        steps: of one loop.
        denoisers: the components that are.
    """

    modular: str
    parts: Callable[[], dict[str, Any]]
    call: Callable[[], dict[str, Any]]
    branches: tuple[str, ...]
    keep: tuple[str, ...] = ("denoise",)
    output: str = "latents"
    loops: int = 1
    steps: int = STEPS
    denoisers: tuple[str, ...] = ("transformer",)


FAMILIES: dict[str, Family] = {
    "flux2": Family(
        "Flux2ModularPipeline",
        lambda: parts.flux2("Flux2Pipeline"),
        lambda: parts.prompts(32, False, height=64, width=64),
        ("cond",),
    ),
    "flux2_klein": Family(
        "Flux2KleinModularPipeline",
        lambda: parts.flux2("Flux2KleinPipeline"),
        lambda: parts.prompts(32, False, height=64, width=64),
        ("cond",),
    ),
    "flux2_klein_base": Family(
        "Flux2KleinBaseModularPipeline",
        lambda: parts.flux2("Flux2KleinPipeline"),
        lambda: parts.prompts(32, height=64, width=64),
        ("cond", "uncond"),
    ),
    "flux3": Family(
        "Flux3ModularPipeline", parts.flux3, lambda: parts.prompts(32, height=64, width=64), ("cond", "uncond")
    ),
    "flux3_distilled": Family(
        "Flux3DistilledModularPipeline",
        lambda: parts.flux3(True),
        lambda: parts.prompts(32, False, height=64, width=64),
        ("cond",),
    ),
    "krea2": Family("Krea2ModularPipeline", parts.krea2, parts.krea2_call, ("cond", "uncond")),
    "krea2_turbo": Family("Krea2TurboModularPipeline", parts.krea2, lambda: parts.krea2_call(False), ("cond",)),
    "ideogram4": Family(
        "Ideogram4ModularPipeline",
        parts.ideogram4,
        lambda: {
            "text_features": embeds(1, TOKENS, 24),
            "text_lengths": [TOKENS],
            "height": 64,
            "width": 64,
            "guidance_schedule": [4.0] * STEPS,
        },
        ("cond", "uncond"),
        denoisers=("transformer", "unconditional_transformer"),
    ),
    "ernie_image": Family(
        "ErnieImageModularPipeline",
        parts.ernie,
        lambda: {
            "prompt_embeds": [embeds(TOKENS, 16)],
            "negative_prompt_embeds": [embeds(TOKENS, 16, seed=1)],
            "height": 64,
            "width": 64,
        },
        ("cond", "uncond"),
    ),
    "anima": Family("AnimaModularPipeline", parts.anima, parts.anima_call, ("cond", "uncond")),
    "qwen21": Family("QwenImage21ModularPipeline", parts.qwen21, parts.qwen21_call, ("pred_cond", "pred_uncond")),
    "qwen21_turbo": Family(
        "QwenImage21TurboModularPipeline", parts.qwen21, lambda: parts.qwen21_call(False), ("cond",)
    ),
    "minimax_h3": Family(
        "MiniMaxH3ModularPipeline",
        lambda: parts.h3("transformer"),
        parts.h3_call,
        ("cond",),
        steps=5,
        denoisers=("transformer", "transformer_ref"),
    ),
    "minimax_music3": Family(
        "MiniMaxMusic3ModularPipeline",
        parts.music3,
        lambda: {"frame_hiddens": embeds(1, 210, 16)},
        ("cond", "uncond"),
        output="latent_chunks",
        loops=2,
    ),
    "helios": Family(
        "HeliosModularPipeline",
        parts.helios,
        lambda: parts.prompts(
            16, height=32, width=32, num_latent_frames_per_chunk=2, num_frames=10, history_sizes=[4, 2, 1]
        ),
        ("pred_cond", "pred_uncond"),
        output="latent_chunks",
        loops=2,
    ),
    "ltx2": Family(
        "LTX2ModularPipeline",
        parts.ltx2,
        parts.ltx2_call,
        ("pred_cond", "pred_uncond", "pred_cond_stg", "pred_cond_modality"),
    ),
    "wan_animate2": Family(
        "WanAnimate2ModularPipeline",
        parts.animate,
        parts.animate_call,
        ("aside", "cond", "uncond"),
        output="segment_frames",
        loops=2,
    ),
    "cosmos3": Family("Cosmos3OmniModularPipeline", parts.cosmos3, parts.cosmos3_call, ("cond", "uncond")),
    "cosmos3_sound": Family(
        "Cosmos3OmniModularPipeline", parts.cosmos3, lambda: parts.cosmos3_call(enable_sound=True), ("cond", "uncond")
    ),
    "wan_animate2_distilled": Family(
        "WanAnimate2DistilledModularPipeline",
        parts.animate,
        parts.animate_call,
        ("aside", "cond"),
        output="segment_frames",
        loops=2,
    ),
    "cosmos3_distilled": Family(
        "Cosmos3DistilledModularPipeline",
        lambda: (
            parts.cosmos3() | {"scheduler": flow(), "distilled_sigmas": [1.0 - step / STEPS for step in range(STEPS)]}
        ),
        parts.cosmos3_call,
        ("cond",),
    ),
    "helios_pyramid": Family(
        "HeliosPyramidModularPipeline",
        lambda: parts.helios(3),
        lambda: parts.pyramid_call(),
        ("pred_cond", "pred_uncond"),
        output="latent_chunks",
        loops=6,
    ),
    "helios_pyramid_distilled": Family(
        "HeliosPyramidDistilledModularPipeline",
        lambda: parts.helios(3, True),
        lambda: parts.pyramid_call(is_amplify_first_chunk=False),
        ("pred_cond",),
        output="latent_chunks",
        loops=6,
    ),
    "ltx25": Family(
        "LTX25ModularPipeline",
        parts.ltx2,
        parts.ltx2_call,
        ("pred_cond", "pred_uncond", "pred_cond_stg", "pred_cond_modality"),
    ),
    "qwen_edit": Family(
        "QwenImageEditModularPipeline",
        parts.qwen,
        lambda: parts.qwen_call(image_latents=parts.picture()),
        ("cond", "uncond"),
    ),
    "qwen_edit_plus": Family(
        "QwenImageEditPlusModularPipeline",
        parts.qwen,
        lambda: parts.qwen_call(image_latents=[parts.picture()]),
        ("cond", "uncond"),
    ),
    "qwen_layered": Family(
        "QwenImageLayeredModularPipeline",
        parts.qwen,
        lambda: parts.qwen_call(image_latents=parts.picture(1, 4), layers=2),
        ("cond", "uncond"),
    ),
    "flux_kontext": Family(
        "FluxKontextModularPipeline",
        parts.kontext,
        lambda: {
            "prompt_embeds": embeds(1, TOKENS, 32),
            "pooled_prompt_embeds": embeds(1, 32),
            "height": 64,
            "width": 64,
            "max_area": 4096,
            "image_latents": embeds(1, 4, 8, 8),
        },
        ("cond",),
    ),
    "wan_i2v": Family(
        "WanImage2VideoModularPipeline",
        lambda: parts.wan(1, 24),
        lambda: parts.wan_call(image_embeds=embeds(1, 5, 24), image_condition_latents=embeds(1, 20, 2, 4, 4)),
        ("cond", "uncond"),
    ),
    "wan22_i2v": Family(
        "Wan22Image2VideoModularPipeline",
        lambda: parts.wan(2, None),
        lambda: parts.wan_call(image_condition_latents=embeds(1, 20, 2, 4, 4)),
        ("cond", "uncond"),
        denoisers=("transformer", "transformer_2"),
    ),
    "wan22_vace": Family(
        "Wan22VaceModularPipeline",
        parts.vace,
        lambda: parts.wan_call(denoiser_input_fields={"control_hidden_states": embeds(1, 96, 2, 4, 4)}),
        ("cond", "uncond"),
        denoisers=("transformer", "transformer_2"),
    ),
}


# Its loop steps no scheduler, so that no cache can tell its steps.
ECHO = Family("EchoModularPipeline", parts.echo, parts.echo_call, ())


# Families whose blocks hand something on beside their streams -> what a cache that looks at blocks says of them.
_STORE = "step aside: blocks fill and read a store of keys and values"
BY_BLOCKS_NOT = dict.fromkeys(("qwen21", "qwen21_turbo", "wan_animate2", "wan_animate2_distilled"), _STORE)
BY_BLOCKS_NOT["wan22_vace"] = "refused: `vace_blocks` act on blocks from outside"


def build(name: str) -> Any:
    """The pipeline, deterministic, in eval mode, no parameter left at zero."""
    import diffusers

    family = ECHO if name == "echo" else FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000)
        made = family.parts()
    generator = torch.Generator().manual_seed(2000)
    for part in made.values():
        if isinstance(part, torch.nn.Module):
            tiny.redraw_zeros(part, generator)
            part.eval()

    def make() -> Any:
        blocks = getattr(diffusers, family.modular)().blocks
        for block in [block for block in blocks.sub_blocks if block not in family.keep]:
            blocks.sub_blocks.pop(block)
        pipe = blocks.init_pipeline()
        pipe.update_components(**made)
        if "guider" in pipe._component_specs and family.modular.startswith("QwenImage21"):  # off by default
            pipe.update_components(guider=pipe.guider.new(guidance_scale=3.0))
        return pipe

    return quiet(make)


def run(pipe: Any, name: str, **more: Any) -> torch.Tensor:
    """What one deterministic call makes, as one flat tensor."""
    family = ECHO if name == "echo" else FAMILIES[name]
    steps = {} if name == "echo" else {"num_inference_steps": STEPS}
    call = family.call() | steps | {"generator": torch.Generator().manual_seed(0)} | more
    made = quiet(lambda: pipe(**{"output": family.output} | call))
    tensors = made if isinstance(made, (list, tuple)) else [made]
    return torch.cat([part.float().flatten() for part in tensors])
