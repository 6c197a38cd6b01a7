"""A plan as a Python script with diffusers alone: what its own hooks, offload and backends can say."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from ..planner.plan import Plan, PlanItem
from .request import NEAR, NOT, SAME, Export, Request, Row, has, number, rows_of

EXTRAS: Mapping[str, str] = {}
_ATTENTION = {
    "native": "native",
    "flash": "flash",
    "flash3": "_flash_3",
    "cudnn": "_native_cudnn",
    "xformers": "xformers",
    "flex": "flex",
    "sage": "sage",
}
_TORCHAO = {"fp8": "Float8DynamicActivationFloat8Weight", "int8": "Int8DynamicActivationInt8Weight"}


class _Writing:
    """Lines of the script while they are put together; `{denoiser}` is any denoiser of the pipeline."""

    def __init__(self, plan: Plan, request: Request) -> None:
        self.plan, self.request = plan, request
        self.imports = {"from diffusers import DiffusionPipeline"}
        self.loading: list[str] = []
        self.lines: list[str] = []
        self.each: list[str] = []  # once for each denoiser
        self.placed = False

    def attention(self, item: PlanItem) -> Row:
        name = item.name.partition(".")[2]
        if name not in _ATTENTION:
            return Row(item.name, NOT, "it has no sparse masks" if name != "auto" else "it does not choose by itself")
        self.each.append(f'denoiser.set_attention_backend("{_ATTENTION[name]}")')
        return Row(item.name, SAME)

    def cache(self, item: PlanItem) -> Row:
        kind = item.name.partition(".")[2]
        if kind == "first_block":
            made = f"FirstBlockCacheConfig(threshold={number(item, 'threshold', 0.08):g})"
            return self._cache(item, made, "the same comparison, without our guards and forecast")
        if kind == "taylorseer":
            interval, order = int(number(item, "interval", 4)), int(number(item, "order", 1))
            before = int(number(item, "first_enhance", 3))
            made = (
                f"TaylorSeerCacheConfig(cache_interval={interval}, disable_cache_before_step={before}, "
                f"max_order={order}, use_lite_mode=True)"
            )
            return self._cache(item, made, "Taylor coefficients instead of Newton's: exact to first order only")
        if kind == "seacache":
            made = "SeaCacheConfig()"
            return self._cache(item, made, "with its own threshold")
        if kind == "magcache":
            return Row(item.name, NOT, "its MagCache wants ratios measured for these steps (calibrate=True)")
        return Row(item.name, NOT, "no such cache in diffusers")

    def _cache(self, item: PlanItem, made: str, why: str) -> Row:
        name = made.partition("(")[0]
        self.imports.add(f"from diffusers.hooks import {name}")
        self.each.append(f"denoiser.enable_cache({made})")
        return Row(item.name, NEAR, why)

    def quantization(self, item: PlanItem) -> Row:
        kind = item.name.partition(".")[2]
        if kind not in ("fp8", "int8"):
            return Row(item.name, NOT, "SVDQuant needs Nunchaku's own transformer classes")
        config = {"fp8": "Float8DynamicActivationFloat8WeightConfig", "int8": "Int8DynamicActivationInt8WeightConfig"}[
            kind
        ]
        self.imports |= {
            "from diffusers import PipelineQuantizationConfig, TorchAoConfig",
            f"from torchao.quantization import {config}",
        }
        parts = ", ".join(f'"{part}": TorchAoConfig({config}())' for part in ("transformer",))
        self.loading.append(f"quantization_config=PipelineQuantizationConfig(quant_mapping={{{parts}}})")
        return Row(item.name, NEAR, "by torchao, every linear layer; ours keeps embedders and modulations")

    def compile(self, item: PlanItem) -> Row:
        self.each.append("denoiser.compile_repeated_blocks()")
        return Row(item.name, SAME)

    def stage(self, item: PlanItem) -> Row:
        self.placed = True
        self.lines += ["if device != 'cpu':", "    pipe.enable_model_cpu_offload()"]
        return Row(item.name, NEAR, "whole components; nothing is fetched ahead, prompts are encoded again")

    def layerwise(self, item: PlanItem) -> Row:
        self.placed = True
        self.lines += [
            "if device != 'cpu':",
            "    pipe.enable_group_offload(torch.device(device), offload_type='leaf_level', use_stream=True)",
        ]
        return Row(item.name, NEAR, "leaves, not blocks; no resident layers, and skipped blocks are fetched as well")

    def tiling(self, item: PlanItem) -> Row:
        if item.fidelity != "lossy":
            return Row(item.name, NOT, "its tiles are blended, which changes the picture")
        self.lines.append("pipe.vae.enable_tiling()")
        return Row(item.name, NEAR, "tiles of diffusers' size")

    def __str__(self) -> str:
        asked = {
            "height": self.request.height,
            "width": self.request.width,
            "num_frames": self.request.frames,
            "num_inference_steps": self.request.steps,
            "guidance_scale": self.request.guidance,
        }
        call = "".join(f"    {name}={value!r},\n" for name, value in asked.items() if value is not None)
        loading = "".join(f"    {line},\n" for line in ["torch_dtype=torch.bfloat16", *self.loading])
        each = "".join(f"        {line}\n" for line in self.each)
        loop = (
            'for name in ("transformer", "transformer_2", "unet"):\n'
            "    denoiser = getattr(pipe, name, None)\n"
            f"    if denoiser is not None:\n{each}"
        )
        imports = "".join(f"{line}\n" for line in sorted(self.imports))
        lines = "".join(f"{line}\n" for line in self.lines)
        place = "" if self.placed else "pipe.to(device)\n"
        if self.placed:
            place = "if device == 'cpu':\n    pipe.to(device)\n"
        return (
            f"import torch\n{imports}\n"
            'device = "cuda" if torch.cuda.is_available() else "cpu"\n'
            f"pipe = DiffusionPipeline.from_pretrained(\n    {self.request.model!r},\n{loading})\n"
            f"{place}{lines}{loop if self.each else ''}"
            f"result = pipe(\n    {self.request.prompt!r},\n{call}"
            f'    generator=torch.Generator("cpu").manual_seed({self.request.seed}),\n)\n'
            + (
                "from diffusers.utils import export_to_video\n\nexport_to_video(result.frames[0], 'out.mp4')\n"
                if self.request.frames
                else "result.images[0].save('out.png')\n"
            )
        )


def write(plan: Plan, request: Request, extras: Mapping[str, str]) -> Export:
    """The script, and what diffusers cannot say."""
    made = _Writing(plan, request)
    rows = rows_of(
        plan,
        {
            "attention": made.attention,
            "cache": made.cache,
            "quantization": made.quantization,
            "compile": made.compile,
            "offload.stage": made.stage,
            "offload.layerwise": made.layerwise,
            "vae.tiling": made.tiling,
        },
        "nothing like it in diffusers",
    )
    notes = []
    if request.gpus > 1:
        notes.append("one GPU: context parallelism in diffusers wants torchrun and a plan of its own")
    if request.serve:
        notes.append("diffusers is no server")
    if has(plan, "quantization") and has(plan, "offload"):
        notes.append("check that torchao's layers move with this offload on your versions")
    return Export("diffusers", importlib.metadata.version("diffusers"), str(made), rows, tuple(notes))
