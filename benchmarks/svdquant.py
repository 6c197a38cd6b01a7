"""SVDQuant against plain 4-bit rounding on a random-weight FLUX with outliers, and on the trained image testbed.

    python benchmarks/svdquant.py            # prints JSON, writes benchmarks/results/svdquant.json

The FLUX has random weights with a power-law spectrum, outlier channels behind the adaLN norms and some large rows:
without such outliers SVDQuant is no better than rounding, and no trained model is without. Errors rank methods; they
are not image quality. Nothing here is timed against anything else.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffaccel import accelerate, quality, restore, testbed
from diffaccel.models.registry import CARDS
from diffaccel.quantization.policy import Policy, select
from diffaccel.quantization.svdquant import jobs as jobs_of
from diffaccel.quantization.svdquant.calibration import Collector
from diffaccel.quantization.svdquant.formats import quantize_activation, quantize_weight
from diffaccel.quantization.svdquant.math import Recipe, reference_forward
from diffaccel.quantization.svdquant.ptq import Settings, quantize_pipeline

RESULTS = Path(__file__).parent / "results" / "svdquant.json"
DIM, TEXT, IMAGE = 768, 64, 256


def outlier_flux(double: int = 4, single: int = 8, seed: int = 0) -> Any:
    """A FluxTransformer2DModel of `double + single` blocks with outliers in weights and activations."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(seed)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=64,
        num_attention_heads=DIM // 64,
        joint_attention_dim=256,
        pooled_projection_dim=128,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    ).eval()
    draw = torch.Generator().manual_seed(seed + 1)
    channels = torch.randperm(DIM, generator=draw)[:6]
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or "blocks." not in name:
            continue
        weight = layer.weight.data
        if "norm" in name:  # modulation: a few channels of the normed input are scaled up by far
            rows = torch.arange(layer.out_features).view(-1, DIM)
            for chunk in (1, 4) if len(rows) == 6 else (1,):
                layer.bias.data[rows[chunk][channels]] += 40.0
            continue
        weight.copy_(power_law(weight.shape, draw))
        large = torch.randperm(layer.out_features, generator=draw)[: max(1, layer.out_features // 100)]
        weight[large] *= 8
    return model


def power_law(shape: Any, draw: torch.Generator) -> torch.Tensor:
    """A random matrix whose singular values fall off as i^-0.7 (about), with rows of norm 1."""
    width = min(shape)
    spectrum = torch.arange(1, width + 1).float() ** -0.7
    out = (torch.randn(shape[0], width, generator=draw) * spectrum) @ torch.randn(width, shape[1], generator=draw)
    return out * (math.sqrt(shape[0]) / out.norm())


def flux_inputs(seed: int) -> dict[str, torch.Tensor]:
    """One call of the FLUX above: 256 image and 64 text tokens."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.zeros(IMAGE, 3)
    ids[:, 1], ids[:, 2] = torch.arange(IMAGE) // 16, torch.arange(IMAGE) % 16
    return {
        "hidden_states": torch.randn(1, IMAGE, 64, generator=draw),
        "encoder_hidden_states": torch.randn(1, TEXT, 256, generator=draw),
        "pooled_projections": torch.randn(1, 128, generator=draw),
        "timestep": torch.rand(1, generator=draw),
        "guidance": torch.full((1,), 3.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def with_forwards(model: nn.Module, forwards: dict[str, Callable[[torch.Tensor], torch.Tensor]], run: Any) -> Any:
    """`run()` while some layers compute something else."""
    for name, forward in forwards.items():
        model.get_submodule(name).forward = forward  # type: ignore[method-assign]
    try:
        return run()
    finally:
        for name in forwards:
            del model.get_submodule(name).forward


def rounding(model: nn.Module, names: Any, act: bool) -> dict[str, Any]:
    """Plain INT4 in groups of 64, of the weights alone or of the activations too."""

    def forward(layer: Any) -> Any:
        weight = quantize_weight(layer.weight.data, "int4").dequantize()
        keep = (lambda x: quantize_activation(x, "int4")) if act else (lambda x: x)
        return lambda x: nn.functional.linear(keep(x), weight, layer.bias)

    return {name: forward(model.get_submodule(name)) for name in names}


def svdquant(
    model: nn.Module, spec: Any, seen: dict[str, Any], recipe: Recipe, layout: str = "best"
) -> dict[str, Any]:
    """Forwards of the quantized layers, computed by the reference."""
    found, _ = jobs_of.jobs(model, spec, Policy(), layout)
    forwards: dict[str, Any] = {}
    for job in found:
        layers, _ = jobs_of.quantize_job(model, job, recipe, seen.get(job.names[0]))
        for name, layer in layers.items():
            forwards[name] = lambda x, layer=layer: reference_forward(x, layer)
    return forwards


def distances(reference: list[torch.Tensor], outputs: list[torch.Tensor]) -> dict[str, float]:
    """Relative L2 error and PSNR (peak: the range of the reference) over a list of outputs."""
    a, b = torch.cat([x.flatten() for x in reference]), torch.cat([x.flatten() for x in outputs])
    mse = (a - b).square().mean()
    return {
        "relative_l2": round(float((a - b).norm() / a.norm()), 4),
        "psnr_db": round(float(10 * torch.log10((a.max() - a.min()).square() / mse)), 2),
    }


@torch.no_grad()
def on_outlier_flux(double: int, single: int) -> dict[str, Any]:
    """Every method on the same model and the same two inputs, none of which it was calibrated on."""
    model = outlier_flux(double, single)
    spec = CARDS["flux"]
    names = select(model, spec, Policy()).quantized
    collector = Collector({name: model.get_submodule(name) for name in names}, 256 * 2**20)  # type: ignore[misc]
    for run in range(4):
        with collector.watching(run):
            model(**flux_inputs(run))
    first = collector.seen[names[0]].absmax
    tests = [flux_inputs(100), flux_inputs(101)]
    reference = [model(**x).sample for x in tests]
    rows: dict[str, Any] = {}

    def measure(label: str, make: Callable[[], dict[str, Any]]) -> None:
        start = time.perf_counter()
        forwards = make()
        seconds = time.perf_counter() - start
        outputs = with_forwards(model, forwards, lambda: [model(**x).sample for x in tests])
        rows[label] = {**distances(reference, outputs), "quantize_s": round(seconds, 2)}

    measure("int4 W4A4 rounding", lambda: rounding(model, names, True))
    measure("int4 W4A16 rounding", lambda: rounding(model, names, False))
    for label, recipe in {
        "svdquant int4 r32, alpha 0.5": Recipe(alpha=(0.5,)),
        "svdquant int4 r32, alpha search": Recipe(),
        "svdquant int4 r32, alpha 0.5, refine 3": Recipe(alpha=(0.5,), refine=3),
        "svdquant nvfp4 r32, alpha 0.5": Recipe(precision="nvfp4", alpha=(0.5,)),
    }.items():
        measure(label, lambda recipe=recipe: svdquant(model, spec, collector.seen, recipe))
    measure("svdquant int4 r32, alpha 0.5, no calibration", lambda: svdquant(model, spec, {}, Recipe(alpha=(0.5,))))
    return {
        "blocks": double + single,
        "layers": len(names),
        "parameters": sum(p.numel() for p in model.parameters()),
        "activation_absmax_over_median": round(float(first.max() / first.median()), 1),
        "rows": rows,
    }


TESTBED_ROWS: dict[str, Settings] = {
    "svdquant int4 r32, alpha search": Settings(),
    "svdquant nvfp4 r32, alpha search": Settings(Recipe(precision="nvfp4")),
}


def on_testbed(pictures: int, steps: int) -> dict[str, Any]:
    """The trained picture pipeline: bytes, one denoiser forward, and whole runs with their prompt score.

    Everything is calibrated on 8 prompts of the training split (4 steps each); the prompts measured are of the test
    split. The reference is the same pipeline with its weights in bfloat16 and float32 arithmetic.
    """
    pipe = testbed.load("image")
    for parameter in pipe.transformer.parameters():
        parameter.data = parameter.data.bfloat16().float()
    pipe.set_progress_bar_config(disable=True)
    call, prompts = testbed.call_kwargs("image"), testbed.prompts("test", pictures)

    def run() -> Any:
        draws = [torch.Generator().manual_seed(i) for i in range(pictures)]
        with torch.no_grad():
            return pipe(prompts, num_inference_steps=steps, generator=draws, output_type="np", **call).images

    captured: list[Any] = []
    handle = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: captured.append((args, kwargs)), with_kwargs=True
    )
    plain = run()
    handle.remove()
    some = captured[:: max(1, len(captured) // 4)]
    with torch.no_grad():
        reference = [pipe.transformer(*args, **kwargs)[0] for args, kwargs in some]
    rows: dict[str, Any] = {"plain": {"prompt_score": round(testbed.score(plain, prompts)["score"], 4)}}
    for label, settings in TESTBED_ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            calibration = testbed.prompts("train", 8)
            report = quantize_pipeline(pipe, CARDS["flux"], Path(folder), settings, calibration, call)
            accelerate(pipe, preset=None, quantization="svdquant", quantization_checkpoint=folder)
            with torch.no_grad():
                outputs = [pipe.transformer(*args, **kwargs)[0] for args, kwargs in some]
            images = run()
            restore(pipe)
        rows[label] = {
            "forward": distances(reference, outputs),
            "pictures_psnr_db": round(quality.compare(plain, images, metrics=("psnr",))["psnr"], 2),
            "prompt_score": round(testbed.score(images, prompts)["score"], 4),
            "bytes": report["bytes"],
            "bytes_bf16": sum(2 * pipe.transformer.get_submodule(n).weight.numel() for n in _names(pipe)),
            "quantize_s": report["seconds"],
        }
    return {"pictures": pictures, "steps": steps, "layers": len(_names(pipe)), "rows": rows}


def _names(pipe: Any) -> tuple[str, ...]:
    return select(pipe.transformer, CARDS["flux"], Policy()).quantized


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs=2, default=(4, 8), metavar=("DOUBLE", "SINGLE"))
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--only", choices=("flux", "testbed"))
    args = parser.parse_args()
    result: dict[str, Any] = {}
    if args.only != "testbed":
        result["outlier_flux"] = on_outlier_flux(*args.blocks)
    if args.only != "flux":
        result["testbed"] = on_testbed(args.pictures, args.steps)
    print(json.dumps(result, indent=2))
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    RESULTS.write_text(json.dumps({**known, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
