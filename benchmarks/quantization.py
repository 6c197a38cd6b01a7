"""What each quantization costs in quality and saves in bytes: ours and those of others, in one run.

    python benchmarks/quantization.py              # prints JSON, writes benchmarks/results/quantization.json
    python benchmarks/quantization.py --prompts 32 --compiled

Three things are measured. One denoiser forward of the trained testbeds (inputs from a real run, bf16) against the
same forward unquantized: relative error and PSNR, with the range of the plain output as peak. Whole pictures and
clips of 28 steps: PSNR to the plain ones, and what the testbed's scorer reads in them. One forward of a FLUX of 12
blocks with random weights and outliers (see benchmarks/svdquant.py). `step_ratio` is the time of the plain forward
divided by that of the quantized one, eager; --compiled adds INT8 and bf16 Linear layers of width 3072, both compiled
by inductor.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from svdquant import flux_inputs, outlier_flux
from torch import nn

from diffaccel import accelerate, quality, testbed
from diffaccel.core.compat import int8_units
from diffaccel.models.registry import CARDS
from diffaccel.quantization import formats
from diffaccel.quantization.backends import Recipe
from diffaccel.quantization.policy import select
from diffaccel.quantization.weights import ScaledWeight, weight_bytes

RESULTS = Path(__file__).parent / "results" / "quantization.json"
STEPS = 28

# Ours: label -> overrides of `accelerate`.
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8 weight_only": {"quantization": "fp8", "quantization_scheme": "weight_only"},
    "fp8 dynamic row": {"quantization": "fp8", "quantization_scheme": "dynamic"},
    "fp8 dynamic tensor": {
        "quantization": "fp8",
        "quantization_scheme": "dynamic",
        "quantization_granularity": "tensor",
    },
    "fp8 storage": {"quantization": "fp8", "quantization_scheme": "storage"},
    "int8 weight_only": {"quantization": "int8", "quantization_scheme": "weight_only"},
    "int8 dynamic": {"quantization": "int8", "quantization_scheme": "dynamic", "compile": False},
    "svdquant int4 (no calibration)": {"quantization": "svdquant"},
    "svdquant nvfp4 (no calibration)": {"quantization": "svdquant", "quantization_precision": "nvfp4"},
}
# The same recipes without a pipeline, for the FLUX with outliers.
RECIPES: dict[str, Recipe] = {
    "fp8 weight_only": Recipe(formats.FP8, "weight_only"),
    "fp8 dynamic row": Recipe(formats.FP8, "dynamic"),
    "fp8 dynamic tensor": Recipe(formats.FP8, "dynamic", rows=False),
    "int8 weight_only": Recipe(torch.int8, "weight_only"),
    "int8 dynamic": Recipe(torch.int8, "dynamic"),
}


def _torchao(config: str) -> Callable[[Any], Any]:
    def apply(pipe: Any) -> Any:
        import torchao.quantization as ao

        chosen = set(select(pipe.transformer, _card(pipe)).quantized)
        ao.quantize_(pipe.transformer, getattr(ao, config)(), filter_fn=lambda _, name: name in chosen)
        return pipe

    return apply


def _quanto(weights: str) -> Callable[[Any], Any]:
    def apply(pipe: Any) -> Any:
        from optimum import quanto

        chosen = list(select(pipe.transformer, _card(pipe)).quantized)
        quanto.quantize(pipe.transformer, weights=getattr(quanto, weights), include=chosen)
        quanto.freeze(pipe.transformer)
        return pipe

    return apply


def _diffusers(config: Callable[[], Any]) -> Callable[[Any], Any]:
    """Saved, and loaded again by diffusers with its own quantizer and its own choice of layers."""

    def apply(pipe: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            pipe.transformer.save_pretrained(folder)
            cls = type(pipe.transformer)
            pipe.transformer = cls.from_pretrained(folder, quantization_config=config(), torch_dtype=torch.bfloat16)
        return pipe

    return apply


def _diffusers_torchao() -> Any:
    from diffusers import TorchAoConfig
    from torchao.quantization import Float8WeightOnlyConfig

    return TorchAoConfig(Float8WeightOnlyConfig())


def _diffusers_quanto() -> Any:
    from diffusers import QuantoConfig

    return QuantoConfig(weights_dtype="int8")


def _layerwise(pipe: Any) -> Any:
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    return pipe


# Those of others, on the same layers where they let one choose.
PEERS: dict[str, Callable[[Any], Any]] = {
    "torchao Float8WeightOnly": _torchao("Float8WeightOnlyConfig"),
    "torchao Float8DynamicActivation": _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "torchao Int8WeightOnly": _torchao("Int8WeightOnlyConfig"),
    "torchao Int8DynamicActivation": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "quanto qfloat8": _quanto("qfloat8"),
    "quanto qint8": _quanto("qint8"),
    "diffusers layerwise casting (e4m3, no scales)": _layerwise,
    "diffusers TorchAoConfig Float8WeightOnly": _diffusers(_diffusers_torchao),
    "diffusers QuantoConfig int8": _diffusers(_diffusers_quanto),
}


def _card(pipe: Any) -> Any:
    name = type(pipe.transformer).__name__
    return next(card for card in CARDS.values() if name in card.classes)


def distance(truth: list[torch.Tensor], given: list[torch.Tensor]) -> dict[str, float]:
    """Relative error and PSNR (peak: the range of the truth) over several outputs together."""
    a, b = torch.cat([t.float().flatten() for t in truth]), torch.cat([t.float().flatten() for t in given])
    mse = float((a - b).square().mean())
    peak = float(a.max() - a.min())
    psnr = 10 * torch.log10(torch.tensor(peak**2 / max(mse, 1e-30))).item()
    return {"relative_error": round(float((a - b).norm() / a.norm()), 5), "psnr_db": round(psnr, 2)}


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Median time of a call, after one that warms up."""
    run()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken)


def calls_of(pipe: Any, call: dict[str, Any], at: tuple[float, ...]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the denoiser is called with at some of its calls in a real run."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args, dict(kwargs))), with_kwargs=True
    )
    try:
        pipe(**call, output_type="latent", generator=torch.Generator().manual_seed(0))
    finally:
        handle.remove()
    return [seen[int(place * (len(seen) - 1))] for place in at]


@torch.no_grad()
def forwards(model: nn.Module, calls: list[Any]) -> list[torch.Tensor]:
    """The denoiser's output for each of the calls."""
    return [model(*args, **(kwargs | {"return_dict": False}))[0] for args, kwargs in calls]


def on_testbed(kind: str, prompts: int, rounds: int, only: list[str] | None, pictures: bool) -> dict[str, Any]:
    """Every scheme, ours and others', on a trained testbed in bf16."""
    words = testbed.prompts("test", n=prompts, kind=kind)
    call = dict(testbed.call_kwargs(kind)) | {"num_inference_steps": STEPS}
    plain = testbed.load(kind, torch_dtype=torch.bfloat16)
    plain.set_progress_bar_config(disable=True)
    calls = calls_of(plain, call | {"prompt": words[:1]}, (0.0, 0.5, 0.9))
    truth = forwards(plain.transformer, calls)
    plain_s = seconds(lambda: forwards(plain.transformer, calls[:1]), rounds)

    def run(pipe: Any) -> Any:
        generator = [torch.Generator().manual_seed(i) for i in range(len(words))]
        result = pipe(**call, prompt=words, generator=generator, output_type="np")
        return result.images if kind == "image" else result.frames

    shown = run(plain) if pictures else None
    score = testbed.score(shown, words)["score"] if pictures else None
    rows: dict[str, Any] = {"plain": {"bytes": weight_bytes(plain.transformer), "score": score}}

    def ours(wish: Mapping[str, Any]) -> Callable[[Any], Any]:
        return lambda pipe: accelerate(pipe, None, strict=True, **wish)

    makers = {**{label: ours(wish) for label, wish in SCHEMES.items()}, **PEERS}
    for label, make in makers.items():
        if only is not None and label not in only:
            continue
        pipe = testbed.load(kind, torch_dtype=torch.bfloat16)
        pipe.set_progress_bar_config(disable=True)
        start = time.perf_counter()
        try:
            pipe = make(pipe)
        except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            rows[label] = {"failed": f"{type(error).__name__}: {str(error)[:160]}"}
            continue
        row: dict[str, Any] = {"quantize_s": round(time.perf_counter() - start, 3)}
        row |= {"bytes": weight_bytes(pipe.transformer), **distance(truth, forwards(pipe.transformer, calls))}
        row["step_ratio"] = round(plain_s / seconds(lambda p=pipe: forwards(p.transformer, calls[:1]), rounds), 3)
        if pictures and (label in SCHEMES or prompts > 8):
            given = run(pipe)
            row["pictures_psnr_db"] = round(quality.compare(shown, given, metrics=("psnr",))["psnr"], 2)
            row["score"] = testbed.score(given, words)["score"]
        rows[label] = row
        print(label, row, flush=True)
    return {"prompts": len(words), "rows": rows}


@torch.no_grad()
def on_outlier_flux(double: int, single: int) -> dict[str, Any]:
    """Every recipe of ours on the FLUX with outliers, in fp32."""
    model = outlier_flux(double, single)
    names = select(model, CARDS["flux"]).quantized
    inputs = [flux_inputs(seed) for seed in (10, 11)]
    truth = [model(**x).sample for x in inputs]
    original = {name: model.get_submodule(name).weight for name in names}
    rows: dict[str, Any] = {"plain": {"bytes": weight_bytes(model)}}
    plain_s = seconds(lambda: model(**inputs[0]), 2)
    for label, recipe in RECIPES.items():
        start = time.perf_counter()
        for name in names:
            weight = recipe.convert(original[name])
            model.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
        spent = time.perf_counter() - start
        row = {"quantize_s": round(spent, 2), "bytes": weight_bytes(model)}
        row |= distance(truth, [model(**x).sample for x in inputs])
        row["step_ratio"] = round(plain_s / seconds(lambda: model(**inputs[0]), 2), 3)
        for name in names:
            model.get_submodule(name).weight = original[name]
        rows[label] = row
        print("outliers:", label, row, flush=True)
    return {"blocks": double + single, "layers": len(names), "rows": rows}


@torch.no_grad()
def compiled_linear(tokens: int = 512, width: int = 3072, rounds: int = 3) -> dict[str, Any]:
    """INT8 dynamic against bf16 for one wide Linear, eager and compiled (inductor)."""
    plain = nn.Linear(width, width, dtype=torch.bfloat16)
    quantized = nn.Linear(width, width, dtype=torch.bfloat16)
    weight = ScaledWeight.of(plain.weight, torch.int8, "dynamic")
    quantized.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(tokens, width, dtype=torch.bfloat16)
    found: dict[str, Any] = {"tokens": tokens, "width": width, "int8_units": int8_units()}
    layers = {"bf16": plain, "int8": quantized}
    for label, layer in layers.items():
        found[f"{label}_eager_s"] = seconds(lambda layer=layer: layer(x), rounds)
        body = torch.compile(layer)
        found[f"{label}_compiled_s"] = seconds(lambda body=body: body(x), rounds)
    found["int8_over_bf16_both_compiled"] = round(found["bf16_compiled_s"] / found["int8_compiled_s"], 2)
    found["int8_over_bf16_both_eager"] = round(found["bf16_eager_s"] / found["int8_eager_s"], 2)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="labels of schemes")
    parser.add_argument("--parts", nargs="+", default=["image", "video", "outliers"])
    parser.add_argument("--no-pictures", action="store_true", help="forwards only")
    parser.add_argument("--blocks", type=int, nargs=2, default=(4, 8), metavar=("DOUBLE", "SINGLE"))
    parser.add_argument("--compiled", action="store_true", help="also time compiled wide layers")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "isa": torch.backends.cpu.get_cpu_capability()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    for kind in ("image", "video"):
        if kind in args.parts:
            result[kind] = on_testbed(kind, args.prompts, args.rounds, args.only, not args.no_pictures)
    if "outliers" in args.parts:
        result["outlier_flux"] = on_outlier_flux(*args.blocks)
    if args.compiled:
        result["linear"] = compiled_linear()
    text = json.dumps(result, indent=2)
    print(text)
    RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
