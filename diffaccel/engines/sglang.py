"""A plan as a command of SGLang diffusion (`sglang generate` or `sglang serve`)."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import InvalidOptionError
from ..planner.plan import Plan, PlanItem
from . import cachedit
from .record import Command, record
from .request import NEAR, NOT, SAME, Export, Request, Row, has, number, one_of, positive, rows_of

EXTRAS = {
    "progressive": "tolerance of progressive resolution, such as 0.05",
    "batch": "active requests of continuous batching, such as 4 (servers)",
    "kv": "int4 or int2: keys and values of causal video (LingBot World)",
    "modelopt": "fp8 or nvfp4: a published ModelOpt checkpoint of the transformer",
}
_ATTENTION = {"native": "torch_sdpa", "flash": "fa", "flash3": "fa", "sage": "sage_attn"}
_SPARSE = {
    "sta": "sliding_tile_attn wants a file of masks that was searched for the model",
    "svg2": "sparse_video_gen_2_attn is the same method with settings of its own, which this plan does not have",
}


class _Writing:
    """One command while it is put together."""

    def __init__(self, plan: Plan, request: Request, extras: Mapping[str, str]) -> None:
        self.plan, self.request, self.extras = plan, request, extras
        self.record = record("sglang")
        self.command = Command(self.record, "serve" if request.serve else "generate")
        self.notes: list[str] = []

    # ---- items -------------------------------------------------------------------------------------------------

    def attention(self, item: PlanItem) -> Row:
        name = item.name.partition(".")[2]
        if name in _ATTENTION:
            self.command.add("--attention-backend", _ATTENTION[name])
            return Row(item.name, SAME, "" if name in ("native", "sage") else "its own build of FlashAttention")
        if name == "auto":
            return Row(item.name, NEAR, "SGLang chooses by itself")
        return Row(item.name, NOT, _SPARSE.get(name, "no such backend in native pipelines"))

    def cache(self, item: PlanItem) -> Row:
        found = cachedit.settings(item)
        if found is None:
            return Row(item.name, NOT, "Cache-DiT and TeaCache are what its command line has")
        if self.request.gpus > 1:
            return Row(item.name, NOT, "Cache-DiT is switched off on more than one GPU in native pipelines")
        cache, row = found
        self.command.set("SGLANG_CACHE_DIT_ENABLED", True)
        for name, value in (("FN", cache.front), ("BN", cache.back), ("WARMUP", cache.warmup)):
            self.command.set(f"SGLANG_CACHE_DIT_{name}", value)
        self.command.set("SGLANG_CACHE_DIT_RDT", cache.threshold)
        if cache.row > 0:
            self.command.set("SGLANG_CACHE_DIT_MC", cache.row)
        if cache.order:
            self.command.set("SGLANG_CACHE_DIT_TAYLORSEER", True)
            self.command.set("SGLANG_CACHE_DIT_TS_ORDER", cache.order)
        return row

    def teacache(self, item: PlanItem) -> Row:
        known = self.record.data["teacache"]
        if self.plan.family not in known["families"] or self.request.model in known["not"]:
            return Row(item.name, NOT, "it has no coefficients for this model there")
        if self.request.serve:
            return Row(item.name, NOT, "asked for by each request (enable_teacache), not by the server")
        self.command.add("--enable-teacache")
        return Row(item.name, NEAR, "with the threshold and coefficients of the engine")

    def quantization(self, item: PlanItem) -> Row:
        kind = item.name.partition(".")[2]
        if "modelopt" in self.extras:
            return Row(item.name, NEAR, "a ModelOpt checkpoint instead: other layers stay in bf16")
        if kind == "fp8":
            self.command.add("--quantization", "fp8")
            return Row(item.name, NEAR, "at load, every linear layer; ours keeps embedders and modulations")
        if kind == "svdquant" and self.request.weights:
            self.command.add("--transformer-weights-path", self.request.weights)
            return Row(item.name, NEAR, "weights as Nunchaku packs them")
        if kind == "svdquant":
            return Row(item.name, NOT, "wants weights as Nunchaku packs them: give --weights")
        return Row(item.name, NOT, "no INT8 for linear layers on a GPU")

    def compile(self, item: PlanItem) -> Row:
        if "progressive" in self.extras:
            raise InvalidOptionError("progressive: SGLang refuses it together with compile (plan with compile=False)")
        self.command.add("--enable-torch-compile", True)
        return Row(item.name, NEAR, "what is compiled is the engine's choice, and it may offload while it compiles")

    def layerwise(self, item: PlanItem) -> Row:
        self.command.add("--dit-layerwise-offload", True)
        self.command.add("--dit-layerwise-resident-layers", int(number(item, "resident_layers", 2)))
        self.command.add("--dit-offload-prefetch-size", int(number(item, "prefetch", 1)))
        where = "" if item.params.get("store", "host") == "host" else "from host memory; it has no store on disk"
        return Row(item.name, NEAR if where else SAME, where)

    def stage(self, item: PlanItem) -> Row:
        if self.extras.get("modelopt") == "fp8":
            raise InvalidOptionError("modelopt=fp8 wants the transformer on the GPU; offload='layerwise' goes")
        for part in ("dit", "text-encoder", "vae"):
            self.command.add(f"--{part}-cpu-offload", True)
        return Row(item.name, SAME, "component by component")

    def tiling(self, item: PlanItem) -> Row:
        if item.fidelity != "lossy":
            return Row(item.name, NOT, "it has blended tiles alone (--vae-tiling), which change the picture")
        self.command.add("--vae-tiling")
        return Row(item.name, NEAR, "tiles of the size of the engine")

    # ---- extras ------------------------------------------------------------------------------------------------

    def add_extras(self) -> None:
        known, model = self.record.data, self.request.model
        if "progressive" in self.extras:
            rule = known["progressive"]
            if self.plan.family not in rule["families"] or model in rule["not"]:
                raise InvalidOptionError(
                    f"progressive: SGLang has it for {', '.join(rule['families'])}, not for {model}"
                )
            if self.request.gpus > 1 or self.request.serve:
                why = "asked for by each request of a server" if self.request.serve else "one GPU only"
                raise InvalidOptionError(f"progressive: {why}")
            self.command.add("--progressive-mode", "dct_rewind")
            self.command.add("--progressive-levels", 1)
            self.command.add("--progressive-delta", positive("progressive", self.extras["progressive"]))
        if "batch" in self.extras:
            clash = has(self.plan, "cache", "offload", "lora")
            if clash or not self.request.serve:
                raise InvalidOptionError(
                    "batch: " + (f"continuous batching excludes {clash}" if clash else "a server's (give --serve)")
                )
            self.command.add("--batching-mode", "continuous")
            self.command.add("--batching-max-size", int(positive("batch", self.extras["batch"])))
            self.command.add("--batching-delay-ms", 5)
        if "kv" in self.extras:
            if "lingbot" not in model.lower():
                raise InvalidOptionError(f"kv: SGLang has it for LingBot World alone, not for {model}")
            self.command.add("--kv-cache-quant", one_of("kv", self.extras["kv"], ("int4", "int2")))
        if "modelopt" in self.extras:
            self._modelopt(one_of("modelopt", self.extras["modelopt"], ("fp8", "nvfp4")))

    def _modelopt(self, kind: str) -> None:
        known, model = self.record.data["modelopt"], self.request.model
        folder, weights = known[kind].get(model), known["weights"].get(kind, {}).get(model)
        if folder is None and weights is None:
            raise InvalidOptionError(f"modelopt={kind}: no published checkpoint of {model} is known to SGLang's table")
        self.command.add("--transformer-path" if folder else "--transformer-weights-path", folder or weights)
        if folder and model.endswith("A14B-Diffusers"):
            self.notes.append("the checkpoint is of the first expert; transformer_2 stays in bf16")


def write(plan: Plan, request: Request, extras: Mapping[str, str]) -> Export:
    """The command, and what it cannot say."""
    made = _Writing(plan, request, extras)
    made.command.add("--model-path", request.model)
    made.command.add("--performance-mode", "manual" if has(plan, "offload") else "speed")
    if request.gpus > 1:
        guidance, ulysses = request.degrees()
        made.command.add("--num-gpus", request.gpus)
        made.command.add("--cfg-parallel-size", guidance)
        made.command.add("--ulysses-degree", ulysses)
    rows = rows_of(
        plan,
        {
            "attention": made.attention,
            "cache.teacache": made.teacache,
            "cache": made.cache,
            "quantization": made.quantization,
            "compile": made.compile,
            "offload.layerwise": made.layerwise,
            "offload.stage": made.stage,
            "vae.tiling": made.tiling,
        },
        "nothing like it on its command line",
    )
    made.add_extras()
    if not request.serve:
        _sampling(made.command, request)
    return Export(
        made.record.engine, made.record.version, str(made.command), rows, tuple(made.notes), made.record.sources
    )


def _sampling(command: Command, request: Request) -> None:
    command.add("--prompt", request.prompt)
    for flag, value in (
        ("--height", request.height),
        ("--width", request.width),
        ("--num-frames", request.frames),
        ("--num-inference-steps", request.steps),
        ("--guidance-scale", request.guidance),
        ("--seed", request.seed),
    ):
        if value is not None:
            command.add(flag, value)
    command.add("--save-output")
