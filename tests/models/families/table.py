"""The families under test. Adding one: its card in `diffaccel/models/`, its builder here beside, and one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests import tiny

from . import images, videos
from .parts import photo, picture

STEPS = 4

COND = ("cond",)
TWO = ("cond", "uncond")
ONE_BATCH = ("cond_uncond",)


@dataclass(frozen=True)
class Family:
    """One pipeline under test.

    Attributes:
        card: the family its denoiser belongs to.
        build: makes the pipeline.
        call: arguments of one call (fresh objects each time), without steps, generator and output type.
        branches: the denoiser calls of a step, in order.
        stands_down: the argument that makes a block cache step aside in every call, if there is one.
    """

    card: str
    build: Callable[[], Any]
    call: Callable[[], dict[str, Any]]
    branches: tuple[str, ...]
    stands_down: str = ""


def _flux(pipeline: str, more: Callable[[], dict[str, Any]], cfg: bool = False, **parts: Any) -> Family:
    def call() -> dict[str, Any]:
        return images.flux_call(cfg, **more())

    return Family("flux", partial(images.flux, pipeline, **parts), call, TWO if cfg else COND)


def _kontext() -> dict[str, Any]:
    return images.flux_image() | {"max_area": 64, "_auto_resize": False}


def _controlnet() -> dict[str, Any]:
    return images.flux_call(control_image=images.flux_image()["image"])


FAMILIES: dict[str, Family] = {
    "chroma": Family("chroma", images.chroma, images.chroma_call, TWO),
    "cogvideox": Family("cogvideox", videos.cogvideox, videos.cogvideox_call, ONE_BATCH),
    "flux_cfg": _flux("FluxPipeline", dict, cfg=True),
    "flux_controlnet": Family("flux", images.flux_controlnet, _controlnet, COND, "controlnet_block_samples"),
    "flux_fill": _flux("FluxFillPipeline", images.flux_mask, in_channels=36),
    "flux_img2img": _flux("FluxImg2ImgPipeline", lambda: images.flux_image() | {"strength": 1.0}, cfg=True),
    "flux_inpaint": _flux("FluxInpaintPipeline", lambda: images.flux_mask() | {"strength": 1.0}, cfg=True),
    "flux_kontext": _flux("FluxKontextPipeline", _kontext, cfg=True),
    "flux2": Family("flux2", partial(images.flux2, "Flux2Pipeline"), images.flux2_call, COND),
    "flux2_klein": Family("flux2", partial(images.flux2, "Flux2KleinPipeline"), images.klein_call, TWO),
    "flux2_klein_kv": Family(
        "flux2",
        partial(images.flux2, "Flux2KleinKVPipeline"),
        lambda: images.flux2_call(image=photo(64)),
        COND,
        "kv_cache_mode",
    ),
    "hunyuan_video": Family("hunyuan_video", videos.hunyuan_video, videos.hunyuan_video_call, TWO),
    "hunyuan_video15": Family(
        "hunyuan_video15", videos.hunyuan_video15, videos.hunyuan_video15_call, ("pred_cond", "pred_uncond")
    ),
    "ltx": Family("ltx", videos.ltx, videos.ltx_call, ONE_BATCH),
    "ltx2": Family("ltx2", videos.ltx2, videos.ltx2_call, ("cond_uncond", "uncond_stg", "uncond_modality")),
    "mochi": Family("mochi", videos.mochi, videos.mochi_call, ONE_BATCH),
    "pixart_alpha": Family("pixart", partial(images.pixart, "PixArtAlphaPipeline"), images.pixart_call, ONE_BATCH),
    "pixart_sigma": Family("pixart", partial(images.pixart, "PixArtSigmaPipeline"), images.pixart_call, ONE_BATCH),
    "qwen": Family("qwen", partial(images.qwen, "QwenImagePipeline"), images.qwen_call, TWO),
    "qwen_edit": Family("qwen", images.qwen_edit, images.qwen_edit_call, TWO),
    "sana": Family("sana", images.sana, images.sana_call, ONE_BATCH),
    "sd3": Family("sd3", partial(tiny.build, "sd3"), lambda: tiny.call_kwargs("sd3"), ONE_BATCH),
    "wan": Family("wan", partial(videos.wan, "WanPipeline"), lambda: videos.wan_call(num_frames=5), TWO),
    "wan22": Family("wan", videos.wan22, lambda: videos.wan_call(num_frames=5), TWO),
    "wan_i2v": Family("wan", videos.wan_i2v, videos.wan_i2v_call, TWO),
    "wan_v2v": Family(
        "wan",
        partial(videos.wan, "WanVideoToVideoPipeline"),
        lambda: videos.wan_call(video=[picture(5, 3, 32, 32)], strength=1.0),
        TWO,
    ),
    "z_image": Family("z_image", images.z_image, images.z_image_call, ONE_BATCH),
}


def build(name: str) -> Any:
    """The pipeline of a family, deterministic, in eval mode, no parameter left at zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000)
        pipe = FAMILIES[name].build()
    generator = torch.Generator().manual_seed(2000)
    for _, module in tiny.component_modules(pipe):
        tiny.redraw_zeros(module, generator)
        module.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: Any, name: str, **more: Any) -> tuple[torch.Tensor, ...]:
    """One deterministic call that returns latents: one tensor, or two where sound comes with the picture."""
    call = FAMILIES[name].call() | {"num_inference_steps": STEPS, "output_type": "latent", "return_dict": False}
    result = pipe(**call | {"generator": torch.Generator().manual_seed(0)} | more)
    return tuple(part for part in result if isinstance(part, torch.Tensor))
