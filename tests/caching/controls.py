"""Tiny pipelines with what people add to a prompt: control networks, adapters, reference pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests import tiny
from tests.models.families import images, parts, table, videos

STEPS = 6


@dataclass(frozen=True)
class Controlled:
    """A pipeline, the arguments of a call, how its denoiser is called in a step, and where its network begins."""

    build: Callable[[], Any]
    call: Callable[[], dict[str, Any]]
    calls: int = 1  # of the denoiser in a step
    denoiser: str = "transformer"
    network: Callable[[Any], torch.nn.Module] | None = None  # a layer that runs whenever the control network does


def flux_network(**more: Any) -> Any:
    """A control network of one double and one single block."""
    from diffusers import FluxControlNetModel

    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    dims = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}
    return FluxControlNetModel(in_channels=16, **sizes, **dims, **more)


def flux_multi() -> Any:
    """Two control networks, added up."""
    return images.flux("FluxControlNetPipeline", controlnet=[flux_network(num_mode=2), flux_network(num_mode=2)])


def flux_union() -> Any:
    """One network for several kinds of control."""
    return images.flux("FluxControlNetPipeline", controlnet=flux_network(num_mode=2))


def flux_call(**more: Any) -> dict[str, Any]:
    """With a control picture."""
    return images.flux_call(control_image=images.flux_image()["image"], **more)


def sd3() -> Any:
    """SD3 with a network of two of its blocks."""
    from diffusers import SD3ControlNetModel, StableDiffusion3ControlNetPipeline

    plain = tiny.build("sd3")
    config = dict(plain.transformer.config) | {"num_layers": 2, "extra_conditioning_channels": 0}
    return StableDiffusion3ControlNetPipeline(**plain.components, controlnet=SD3ControlNetModel.from_config(config))


def sd3_call() -> dict[str, Any]:
    """Its network draws from the global state: see `run`."""
    more = {"control_image": parts.picture(1, 3, 8, 8), "output_type": "latent"}
    return tiny.call_kwargs("sd3", **more)


def _sdxl(union: bool = False) -> Any:
    from diffusers import ControlNetModel, ControlNetUnionModel

    plain = tiny.build("sdxl")
    if not union:
        return plain, ControlNetModel.from_unet(plain.unet, conditioning_embedding_out_channels=(16, 32))
    names = (
        "in_channels", "down_block_types", "block_out_channels", "layers_per_block", "cross_attention_dim",
        "transformer_layers_per_block", "attention_head_dim", "use_linear_projection", "addition_embed_type",
        "addition_time_embed_dim", "projection_class_embeddings_input_dim", "norm_num_groups",
    )  # fmt: skip
    config = {name: plain.unet.config[name] for name in names}
    more = {"num_control_type": 2, "num_trans_channel": 16, "num_trans_head": 2, "num_proj_channel": 16}
    return plain, ControlNetUnionModel(conditioning_embedding_out_channels=(16, 32), **config, **more)


def sdxl() -> Any:
    """SDXL with a network made from its U-Net."""
    from diffusers import StableDiffusionXLControlNetPipeline

    plain, network = _sdxl()
    return StableDiffusionXLControlNetPipeline(**plain.components, controlnet=network)


def sdxl_union() -> Any:
    """SDXL with one network for several kinds of control."""
    from diffusers import StableDiffusionXLControlNetUnionPipeline

    plain, network = _sdxl(union=True)
    return StableDiffusionXLControlNetUnionPipeline(**plain.components, controlnet=network)


def sdxl_call(**more: Any) -> dict[str, Any]:
    """With a control picture of the size of the result."""
    return tiny.call_kwargs("sdxl", output_type="latent") | {"image": parts.picture(1, 3, 16, 16)} | more


def sdxl_union_call() -> dict[str, Any]:
    """The picture's kind is the first."""
    call = sdxl_call()
    return {k: v for k, v in call.items() if k != "image"} | {"control_image": [call["image"]], "control_mode": [0]}


def sdxl_adapter() -> Any:
    """SDXL with a T2I-Adapter, which runs once before the loop."""
    from diffusers import StableDiffusionXLAdapterPipeline, T2IAdapter

    plain = tiny.build("sdxl")
    adapter = T2IAdapter(
        in_channels=3, channels=[16, 32, 32, 32], num_res_blocks=1, downscale_factor=4, adapter_type="full_adapter_xl"
    )
    return StableDiffusionXLAdapterPipeline(**plain.components, adapter=adapter)


def qwen() -> Any:
    """Qwen-Image with a network of two blocks; true guidance gives both calls what it said."""
    from diffusers import QwenImageControlNetModel, QwenImageControlNetPipeline

    network = QwenImageControlNetModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    plain = images.qwen("QwenImagePipeline")
    return QwenImageControlNetPipeline(**plain.components, controlnet=network)


def qwen_call() -> dict[str, Any]:
    """True guidance."""
    return images.qwen_call(control_image=parts.picture(1, 3, 16, 16), control_guidance_start=0.0)


def flux_reference() -> Any:
    """FLUX.1 with an IP-Adapter."""
    pipe = images.flux("FluxPipeline")
    width = 32
    made: dict[str, Any] = {
        "image_proj": {
            "proj.weight": parts.embeds(4 * width, 24, seed=5) * 0.1,
            "proj.bias": torch.zeros(4 * width),
            "norm.weight": torch.ones(width),
            "norm.bias": torch.zeros(width),
        },
        "ip_adapter": {},
    }
    for index in range(4):
        for name in ("k", "v"):
            made["ip_adapter"][f"{index}.to_{name}_ip.weight"] = parts.embeds(32, width, seed=10 + index) * 0.1
            made["ip_adapter"][f"{index}.to_{name}_ip.bias"] = torch.zeros(32)
    pipe.transformer._load_ip_adapter_weights([made])
    return pipe


def flux_reference_call() -> dict[str, Any]:
    """A picture's embedding, and an empty one for the other branch."""
    more = {"ip_adapter_image_embeds": [parts.embeds(1, 1, 24, seed=7)]}
    more |= {"negative_ip_adapter_image_embeds": [torch.zeros(1, 1, 24)]}
    return images.flux_call(True, **more)


def vace() -> Any:
    """Wan VACE: the blocks that carry the control lie in the denoiser itself."""
    import diffusers

    plain = videos.wan("WanPipeline")
    config = dict(plain.transformer.config) | {"vace_layers": [0, 2], "vace_in_channels": 96}
    transformer = diffusers.WanVACETransformer3DModel.from_config(config)
    components = {k: v for k, v in plain.components.items() if k != "transformer" and "transformer_2" not in k}
    return diffusers.WanVACEPipeline(**components, transformer=transformer)


def vace_call() -> dict[str, Any]:
    """A grey video to follow."""
    return videos.wan_call(num_frames=5)


CONTROLLED: dict[str, Controlled] = {
    "flux": Controlled(images.flux_controlnet, flux_call, 1, "transformer", lambda p: p.controlnet.x_embedder),
    "flux_cfg": Controlled(
        images.flux_controlnet, lambda: flux_call(cfg=True), 2, "transformer", lambda p: p.controlnet.x_embedder
    ),
    "flux_union": Controlled(
        flux_union, lambda: flux_call(control_mode=0), 1, "transformer", lambda p: p.controlnet.x_embedder
    ),
    "flux_multi": Controlled(
        flux_multi,
        lambda: (
            flux_call()
            | {
                "control_image": [parts.picture(1, 3, 8, 8), parts.picture(1, 3, 8, 8).flip(-1)],
                "control_mode": [0, 1],
                "controlnet_conditioning_scale": [0.7, 0.4],
            }
        ),
        1,
        "transformer",
        lambda p: p.controlnet.nets[1].x_embedder,
    ),
    "sd3": Controlled(sd3, sd3_call, 1, "transformer", lambda p: p.controlnet.pos_embed_input),
    "sdxl": Controlled(sdxl, sdxl_call, 1, "unet", lambda p: p.controlnet.conv_in),
    "sdxl_union": Controlled(sdxl_union, sdxl_union_call, 1, "unet", lambda p: p.controlnet.conv_in),
    "qwen": Controlled(qwen, qwen_call, 2, "transformer", lambda p: p.controlnet.img_in),
    "sdxl_adapter": Controlled(sdxl_adapter, sdxl_call, 1, "unet"),
    "flux_reference": Controlled(flux_reference, flux_reference_call, 2),
    "vace": Controlled(vace, vace_call, 2),
    "kontext": Controlled(lambda: table.FAMILIES["flux_kontext"].build(), table.FAMILIES["flux_kontext"].call, 2),
    "fill": Controlled(lambda: table.FAMILIES["flux_fill"].build(), table.FAMILIES["flux_fill"].call, 1),
    "edit": Controlled(images.qwen_edit, images.qwen_edit_call, 2),
}


def build(name: str) -> Any:
    """The same weights every time, nothing zero, progress bar off."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        pipe = CONTROLLED[name].build()
    generator = torch.Generator().manual_seed(5)
    for _, module in tiny.component_modules(pipe):
        tiny.redraw_zeros(module, generator)
        module.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: Any, name: str, **more: Any) -> torch.Tensor:
    """Latents of one call that is the same every time."""
    call = CONTROLLED[name].call() | {"num_inference_steps": STEPS, "output_type": "latent"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return tiny.output(pipe(**call | {"generator": torch.Generator().manual_seed(0)} | more))
