"""A plan as a command of xDiT's runner (`xdit`, which is torchrun over its own wrappers of diffusers' pipelines)."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import InvalidOptionError, UnsupportedModelError, few
from ..planner.plan import Plan, PlanItem
from .record import Command, record
from .request import NEAR, NOT, SAME, Export, Request, Row, one_of, positive, rows_of

EXTRAS = {
    "pipefusion": "stages of PipeFusion, such as 4",
    "parallel_vae": "true: the decoder's rows over all GPUs",
    "shard": "GPUs that each hold a part of the weights, such as 4",
}
_ATTENTION = {"native": "SDPA", "flash": "FLASH", "flash3": "FLASH_3", "cudnn": "CUDNN", "sage": "SAGE"}


class _Writing:
    """One command while it is put together."""

    def __init__(self, plan: Plan, request: Request, extras: Mapping[str, str]) -> None:
        self.plan, self.request, self.extras = plan, request, extras
        self.record = record("xdit")
        models = self.record.data["models"]
        if request.model not in models:
            raise UnsupportedModelError(f"xDiT's runner does not know {request.model}. It runs {few(sorted(models))}")
        self.can = frozenset(models[request.model])
        self.command = Command(self.record)

    def attention(self, item: PlanItem) -> Row:
        name = item.name.partition(".")[2]
        if name == "auto":
            return Row(item.name, NEAR, "xDiT chooses by itself")
        if name not in _ATTENTION:
            return Row(item.name, NOT, "no such backend")
        if _ATTENTION[name] not in self.record.data["attention_backends"]:
            raise LookupError(_ATTENTION[name])
        self.command.add("--attention_backend", _ATTENTION[name])
        return Row(item.name, SAME)

    def cache(self, item: PlanItem) -> Row:
        if item.name != "cache.first_block":
            return Row(item.name, NOT, "FBCache is the runner's only cache")
        if "use_fbcache" not in self.can:
            return Row(item.name, NOT, f"its FBCache does not go with {self.request.model}")
        self.command.add("--use_fbcache")
        return Row(item.name, NEAR, "the same comparison, with the threshold of the engine")

    def quantization(self, item: PlanItem) -> Row:
        kind = item.name.partition(".")[2]
        if f"use_{kind}_gemms" not in self.can:
            return Row(item.name, NOT, f"its runner has none for {self.request.model}")
        self.command.add(f"--use_{kind}_gemms")
        return Row(item.name, NEAR, "linear layers of the blocks; which stay in bf16 is the engine's choice")

    def compile(self, item: PlanItem) -> Row:
        self.command.add("--use_torch_compile")
        return Row(item.name, NEAR, "the whole transformer instead of block by block")

    def stage(self, item: PlanItem) -> Row:
        self.command.add("--enable_model_cpu_offload")
        return Row(item.name, NEAR, "diffusers' own model offload")

    def layerwise(self, item: PlanItem) -> Row:
        self.command.add("--enable_sequential_cpu_offload")
        return Row(item.name, NEAR, "diffusers' sequential offload: layer by layer, but nothing is fetched ahead")

    def tiling(self, item: PlanItem) -> Row:
        if item.fidelity != "lossy":
            return Row(item.name, NOT, "one GPU has blended tiles alone; strips over GPUs are parallel_vae")
        if "enable_tiling" not in self.can:
            return Row(item.name, NOT, f"no tiles for {self.request.model}")
        self.command.add("--enable_tiling")
        return Row(item.name, NEAR, "tiles of diffusers' size")

    def parallel(self) -> None:
        """Degrees: PipeFusion where it is asked for, guidance where there are two branches, Ulysses for the rest."""
        stages = int(positive("pipefusion", self.extras["pipefusion"])) if "pipefusion" in self.extras else 1
        if stages > 1 and "pipefusion_parallel_degree" not in self.can:
            raise InvalidOptionError(f"pipefusion: xDiT has it for other models, not for {self.request.model}")
        if self.request.gpus % stages:
            raise InvalidOptionError(f"pipefusion={stages} does not divide {self.request.gpus} GPUs")
        guidance, ulysses = self.request.degrees()
        if guidance == 2 and "use_cfg_parallel" not in self.can:
            guidance, ulysses = 1, self.request.gpus
        if ulysses % stages:
            raise InvalidOptionError(f"pipefusion={stages} does not divide the {ulysses} GPUs of a branch")
        if guidance == 2:
            self.command.add("--use_cfg_parallel")
        if ulysses // stages > 1:
            if "ulysses_degree" not in self.can:
                raise UnsupportedModelError(f"xDiT has no Ulysses for {self.request.model}")
            self.command.add("--ulysses_degree", ulysses // stages)
        if stages > 1:
            self.command.add("--pipefusion_parallel_degree", stages)
        if "parallel_vae" in self.extras:
            one_of("parallel_vae", self.extras["parallel_vae"], ("true",))
            self._require("use_parallel_vae", "parallel_vae")
            self.command.add("--use_parallel_vae")
        if "shard" in self.extras:
            self._require("fully_shard_degree", "shard")
            self.command.add("--fully_shard_degree", int(positive("shard", self.extras["shard"])))

    def _require(self, capability: str, extra: str) -> None:
        if capability not in self.can:
            raise InvalidOptionError(f"{extra}: xDiT has it for other models, not for {self.request.model}")


def write(plan: Plan, request: Request, extras: Mapping[str, str]) -> Export:
    """The command, and what it cannot say."""
    made = _Writing(plan, request, extras)
    made.command.add("--model", request.model)
    made.parallel()
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
        "nothing like it in its runner",
    )
    made.command.add("--prompt", request.prompt)
    for flag, value in (
        ("--height", request.height),
        ("--width", request.width),
        ("--num_frames", request.frames),
        ("--num_inference_steps", request.steps),
        ("--guidance_scale", request.guidance),
        ("--seed", request.seed),
    ):
        if value is not None:
            made.command.add(flag, value)
    notes = ("xDiT is no server of its own: its example of one is a Ray service for a few pipelines",) * request.serve
    return Export(made.record.engine, made.record.version, str(made.command), rows, notes, made.record.sources)
