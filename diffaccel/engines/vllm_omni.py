"""A plan as a command of vLLM-Omni (`vllm serve MODEL --omni`), or as a script where only Python arguments do it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidOptionError
from ..planner.plan import Plan, PlanItem
from . import cachedit
from .record import Command, record
from .request import NEAR, NOT, SAME, Export, Request, Row, has, number, one_of, positive, rows_of

EXTRAS = {
    "vae_fast_path": "off, lossless (its default) or channels_last: the decoder of Wan",
    "pipefusion": "stages of PipeFusion, such as 4 (a script, not a server)",
    "inter_request": "GB of latents kept for requests to come, such as 16",
    "batch": "requests whose steps are computed together, such as 4",
    "kv": "fp8, mxfp8 or mxfp4: queries, keys and values of attention",
}
_ATTENTION = {
    "native": "TORCH_SDPA",
    "flash": "FLASH_ATTN",
    "flash3": "FLASH_ATTN",
    "cudnn": "CUDNN_ATTN",
    "sage": "SAGE_ATTN",
}


class _Writing:
    """One command while it is put together; `cache` is (backend, its settings)."""

    def __init__(self, plan: Plan, request: Request, extras: Mapping[str, str]) -> None:
        self.plan, self.request, self.extras = plan, request, extras
        self.record = record("vllm_omni")
        self.command = Command(self.record, request.model)
        self.backend = ""
        self.settings: dict[str, Any] = {}
        self.notes: list[str] = []

    def attention(self, item: PlanItem) -> Row:
        name = item.name.partition(".")[2]
        if name not in _ATTENTION:
            why = "it chooses by itself" if name == "auto" else "no such backend"
            return Row(item.name, NEAR if name == "auto" else NOT, why)
        self.command.add("--diffusion-attention-backend", _ATTENTION[name])
        return Row(item.name, SAME, "the FlashAttention that is installed" if name.startswith("flash") else "")

    def cache(self, item: PlanItem) -> Row:
        found, kind = cachedit.settings(item), item.name.partition(".")[2]
        if "batch" in self.extras:
            raise InvalidOptionError(f"batch: vLLM-Omni excludes caches from step execution ({item.name} is on)")
        if found is not None:
            cache, row = found
            self.backend = "cache_dit"
            self._set(Fn_compute_blocks=cache.front, Bn_compute_blocks=cache.back, max_warmup_steps=cache.warmup)
            self._set(residual_diff_threshold=cache.threshold, max_continuous_cached_steps=cache.row)
            if cache.order:
                self._set(enable_taylorseer=True, taylorseer_order=cache.order)
            return row
        if kind == "teacache":
            self.backend = "tea_cache"
            if (threshold := number(item, "threshold", 0.0)) > 0:
                self._set(rel_l1_thresh=threshold)
            return Row(item.name, NEAR, "with its own coefficients")
        if kind == "magcache":
            self.backend = "mag_cache"
            for name, ours in (("mag_threshold", "threshold"), ("mag_retention_ratio", "retention")):
                if (value := number(item, ours, 0.0)) > 0:
                    self._set(**{name: value})
            if (steps := int(number(item, "max_steps", 0))) > 0:
                self._set(mag_max_skip_steps=steps)
            return Row(item.name, NEAR, "with its own table of ratios")
        if kind == "seacache":
            self.backend = "sea_cache"
            return Row(item.name, NEAR, "with its own threshold")
        return Row(item.name, NOT, "no such cache backend")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            if name not in self.record.data["cache_config"][self.backend]["keys"]:
                raise LookupError(f"{self.backend} takes no {name}")
            self.settings[name] = value

    def quantization(self, item: PlanItem) -> Row:
        kind = item.name.partition(".")[2]
        if kind not in ("fp8", "int8"):
            return Row(item.name, NOT, "no SVDQuant; AutoRound checkpoints are its 4 bits")
        self.command.add("--quantization", kind)
        return Row(item.name, NEAR, "text encoder and VAE as well; other layers stay in bf16 than here")

    def compile(self, item: PlanItem) -> Row:
        self.command.add("--diffusion-compile-granularity", "regional")
        return Row(item.name, SAME)

    def offload(self, item: PlanItem) -> Row:
        if item.name == "offload.stage":
            config: dict[str, Any] = {"mode": "module", "components": ["dit", "text_encoder"]}
        else:
            resident = int(number(item, "resident_layers", 2))
            config = {"mode": "layer", "components": ["dit"], "layer_options": {"dit": {"resident_layers": resident}}}
        self.command.add("--diffusion-offload-config", config)
        where = "" if item.params.get("store") in (None, "host") else "from host memory; it has no store on disk"
        return Row(item.name, NEAR if where else SAME, where)

    def tiling(self, item: PlanItem) -> Row:
        if item.fidelity != "lossy":
            return Row(item.name, NOT, "one GPU has blended tiles alone (--vae-use-tiling), which change the picture")
        self.command.add("--vae-use-tiling")
        return Row(item.name, NEAR, "tiles of the size of the engine")

    def add_extras(self) -> None:
        if "vae_fast_path" in self.extras:
            level = one_of("vae_fast_path", self.extras["vae_fast_path"], ("off", "lossless", "channels_last"))
            if self.plan.family not in self.record.data["wan_vae_families"]:
                raise InvalidOptionError(f"vae_fast_path is for the VAE of Wan, not for {self.request.model}")
            self.command.add("--vae-fast-path", level)
        if "inter_request" in self.extras:
            most = positive("inter_request", self.extras["inter_request"])
            if self.backend not in ("", "cache_dit"):
                raise InvalidOptionError(f"inter_request: with no cache or with Cache-DiT, not with {self.backend}")
            self.backend = "inter_request+cache_dit" if self.backend else "inter_request"
            self.settings["inter_request_max_memory_gb"] = most
            self.notes.append("prompts are compared word by word: alike ones want inter_request_clip_model_path")
        if "batch" in self.extras:
            self.command.add("--step-execution")
            self.command.add("--max-num-seqs", int(positive("batch", self.extras["batch"])))
        if "kv" in self.extras:
            self.command.add("--diffusion-kv-cache-dtype", one_of("kv", self.extras["kv"], ("fp8", "mxfp8", "mxfp4")))

    def script(self) -> str:
        """Omni(...) with PipeFusion, which is documented as arguments of Python alone."""
        stages = int(positive("pipefusion", self.extras["pipefusion"]))
        if stages < 2 or (busy := has(self.plan, "quantization", "offload", "attention", "vae")):
            why = "wants at least 2 stages" if stages < 2 else f"is written without {busy}: plan without it"
            raise InvalidOptionError(f"pipefusion {why}")
        known, asked = self.record.data["omni"], self.request
        engine: dict[str, Any] = {"model": asked.model, "pipeline_parallel_size": stages, "enable_pipefusion": True}
        if self.backend:
            engine |= {"cache_backend": self.backend, "cache_config": self.settings}
        sampling: dict[str, Any] = {
            "num_inference_steps": asked.steps,
            "num_frames": asked.frames,
            "height": asked.height,
        }
        sampling |= {"width": asked.width, "guidance_scale": asked.guidance, "seed": asked.seed}
        sampling |= {"pipefusion_warmup_steps": 1, "pipefusion_split_dim": "height"}
        given = {name: value for name, value in sampling.items() if value is not None}
        if unknown := (set(engine) - set(known["engine"])) | (set(given) - set(known["sampling"])):
            raise LookupError(f"not recorded: {sorted(unknown)}")
        lines = ["from vllm_omni import Omni", "from vllm_omni.inputs.data import OmniDiffusionSamplingParams", ""]
        lines += ["omni = Omni(", *(f"    {name}={value!r}," for name, value in engine.items()), ")"]
        lines += ["asked = OmniDiffusionSamplingParams(", *(f"    {k}={v!r}," for k, v in given.items()), ")"]
        return "\n".join([*lines, f"outputs = omni.generate({{'prompt': {asked.prompt!r}}}, asked)"])


def write(plan: Plan, request: Request, extras: Mapping[str, str]) -> Export:
    """The command or script, and what it cannot say."""
    made = _Writing(plan, request, extras)
    made.command.add("--omni")
    made.command.add("--port", 8091)
    if request.gpus > 1:
        guidance, ulysses = request.degrees()
        made.command.add("--num-gpus", request.gpus)
        made.command.add("--cfg-parallel-size", guidance)
        made.command.add("--ulysses-degree", ulysses)
    rows = rows_of(
        plan,
        {
            "attention": made.attention,
            "cache": made.cache,
            "quantization": made.quantization,
            "compile": made.compile,
            "offload": made.offload,
            "vae.tiling": made.tiling,
        },
        "nothing like it on its command line",
    )
    if not has(plan, "compile"):
        made.command.add("--enforce-eager")
    made.add_extras()
    if "pipefusion" in extras:
        text = made.script()
    else:
        if made.backend:
            made.command.add("--cache-backend", made.backend)
        if made.settings:
            made.command.add("--cache-config", made.settings)
        text = f"{made.command}\n\n{_call(request)}"
    return Export(made.record.engine, made.record.version, text, rows, tuple(made.notes), made.record.sources)


def _call(request: Request) -> str:
    """What to ask the server."""
    wish: dict[str, Any] = {"prompt": request.prompt, "seed": request.seed}
    if request.width and request.height:
        wish["size"] = f"{request.width}x{request.height}"
    if request.steps is not None:
        wish["num_inference_steps"] = request.steps
    if request.frames:
        return "# a job, asked for again until it is done: POST /v1/videos with " + ", ".join(wish)
    return (
        "curl -s http://localhost:8091/v1/images/generations -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(wish))}"
    )
