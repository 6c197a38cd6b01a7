"""Block-sparse attention against dense SDPA: time, and distance from dense attention.

    python benchmarks/sparse_attention.py            # N = 4096 and 8192, float32: about 8 minutes
    python benchmarks/sparse_attention.py --full     # also 16384, bfloat16, densities 0.2 and 0.4
    python benchmarks/sparse_attention.py --only figures | times | quality

figures  the three settings with a target (the issue's), N = 6144 and 8192, head_dim 128, 1 thread
times    every method at densities 0.1 to 0.5: dense seconds over sparse ones, medians of interleaved runs. `ratio`
         counts all that a call pays, with making the plan where it hangs on q and k; `kernel` the attention alone.
         Random q and k: for svg2 the cap decides, not top_p.
quality  PSNR of attention's output (peak: range of the dense output) on q, k and v recorded from the video testbed,
         in two sizes: 576 tokens with blocks of 16 (128 would be a fifth of the sequence), and 6144 with blocks of
         128. The larger one is beyond what the testbed was trained at: it shows the methods' order, not a picture.

`density` is what a plan keeps, by pairs of tokens, which may be less than asked for (windows are whole tiles) or more
(radial always keeps neighbouring frames whole). This CPU only; GPU figures: benchmarks/gpu/attention.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F

from diffaccel.attention.geometry import Geometry
from diffaccel.attention.kernels.torch_plan import block_sparse
from diffaccel.attention.plan import HeadPlans
from diffaccel.attention.sparse import radial, svg
from diffaccel.attention.sparse.registry import METHODS, Query, make_method

HEAD_DIM = 128
DENSITIES = (0.1, 0.2, 0.3, 0.4, 0.5)
GRIDS = {4096: Geometry(16, 16, 16), 8192: Geometry(32, 16, 16), 16384: Geometry(32, 16, 32)}


def timed(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, runs interleaved, after one run that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def tensors(tokens: int, heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v [1, H, N, D] as processors have them: views of [1, N, H, D]."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, heads, HEAD_DIM)
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(3)]


# ---- figures --------------------------------------------------------------------------------------------------------


def figure_plans(tokens: int) -> dict[str, tuple[HeadPlans, float]]:
    """The three settings of the issue: (plan, least ratio)."""
    frames = tokens // 512
    wide, narrow = Geometry(frames, 16, 32), Geometry(2 * frames, 16, 16, frame_sink=True)
    band = svg.half_width(wide, frames / 8)
    return {
        "sta": (make_method("sta", density=0.19).plan(Query(wide)), 4.2),
        "svg": (HeadPlans((svg.spatial_plan(wide, band), svg.temporal_plan(wide, band)), torch.tensor([[0, 1]])), 2.2),
        "radial": (HeadPlans((radial.radial_plan(narrow, decay=0.3, shrink="strict", sink=True),)), 1.2),
    }


def figures(repeats: int) -> list[dict[str, Any]]:
    """One row a setting and length."""
    rows = []
    for tokens in (6144, 8192):
        q, k, v = tensors(tokens, 2, torch.float32)
        settings = figure_plans(tokens)
        runs: dict[str, Callable[[], Any]] = {"dense": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v)}
        for name, (plans, _) in settings.items():
            runs[name] = lambda q=q, k=k, v=v, plans=plans: block_sparse(q, k, v, plans)
        seconds = timed(runs, repeats)
        for name, (plans, least) in settings.items():
            ratio = seconds["dense"] / seconds[name]
            row = {"method": name, "tokens": tokens, "density": round(plans.density, 3), "ratio": round(ratio, 2)}
            rows.append({**row, "least": least, "holds": ratio >= least})
    return rows


# ---- times ----------------------------------------------------------------------------------------------------------


def call(method: Any, geometry: Geometry, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """One call as a run makes it: plan (kept where the method keeps it) and attention."""
    state: dict[str, Any] = {}
    return lambda: block_sparse(q, k, v, method.plan(Query(geometry, q, k, v, state=state)))


def times(
    sizes: list[int], dtypes: list[torch.dtype], densities: tuple[float, ...], repeats: int
) -> list[dict[str, Any]]:
    """One row a method, length, dtype and density."""
    rows = []
    for dtype in dtypes:
        for tokens in sizes:
            geometry = GRIDS[tokens]
            q, k, v = tensors(tokens, 2, dtype)
            dense = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
            for density in densities:
                methods = {name: make_method(name, density=density) for name in METHODS}
                plans = {name: method.plan(Query(geometry, q, k, v)) for name, method in methods.items()}
                runs: dict[str, Callable[[], Any]] = {"dense": dense}
                for name, method in methods.items():
                    runs[name] = call(method, geometry, q, k, v)
                    runs[f"{name} kernel"] = lambda q=q, k=k, v=v, kept=plans[name]: block_sparse(q, k, v, kept)
                seconds = timed(runs, repeats)
                for name in methods:
                    row = {"method": name, "tokens": tokens, "dtype": str(dtype).removeprefix("torch.")}
                    row |= {"asked": density, "density": round(plans[name].density, 3)}
                    row |= {"ratio": round(seconds["dense"] / seconds[name], 2)}
                    rows.append(row | {"kernel": round(seconds["dense"] / seconds[f"{name} kernel"], 2)})
    return rows


# ---- quality --------------------------------------------------------------------------------------------------------

Recorded = tuple[Geometry, torch.Tensor, torch.Tensor, torch.Tensor]


def record(
    frames: int, height: int, width: int, steps: int = 4, layers: tuple[int, ...] = (1, 3, 5)
) -> list[Recorded]:
    """(geometry, q, k, v [1, H, N, D]) of some layers at the second and last step of a dense run."""
    from diffaccel import accelerate, restore, testbed

    pipe = testbed.load("video")
    found: list[Recorded] = []
    values: dict[int, torch.Tensor] = {}

    def keep(geometry: Geometry, q: Any, k: Any, *, layer: int, step: int, state: Any) -> None:
        if layer in layers and step in (1, steps - 1):
            heads = values[layer].unflatten(2, (q.shape[1], -1)).transpose(1, 2)
            found.append((geometry, q[-1:].clone(), k[-1:].clone(), heads[-1:].clone()))

    hooks = [
        block.attn1.to_v.register_forward_hook(lambda _, __, output, i=i: values.__setitem__(i, output))
        for i, block in enumerate(pipe.transformer.blocks)
    ]
    try:
        accelerate(pipe, preset=None)
        pipe.enable_sparse_attention(method=keep, dense_steps=0, dense_layers=0)
        settings = {**testbed.call_kwargs("video"), "height": height, "width": width, "num_frames": frames}
        generator = torch.Generator().manual_seed(0)
        prompt = testbed.prompts(kind="video", n=1)[0]
        pipe(prompt, num_inference_steps=steps, generator=generator, output_type="latent", **settings)
        restore(pipe)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def psnr(sparse: torch.Tensor, dense: torch.Tensor) -> float:
    """dB, the peak being the range of the dense output."""
    error = float((sparse - dense).square().mean())
    return float(10 * torch.log10((dense.max() - dense.min()) ** 2 / error)) if error else float("inf")


def quality(sizes: dict[int, tuple[int, int, int]]) -> list[dict[str, Any]]:
    """One row a method, size and density; `sizes`: block by (frames, height, width) in pixels."""
    rows = []
    for block, size in sizes.items():
        recorded = record(*size)
        dense = [F.scaled_dot_product_attention(q, k, v) for _, q, k, v in recorded]
        for name in METHODS:
            print(f"  {size} {name}", file=sys.stderr)
            for density in DENSITIES:
                method = make_method(name, density=density, block=block, **clusters(name, recorded[0][0], block))
                kept, decibels = [], []
                for (geometry, q, k, v), truth in zip(recorded, dense, strict=True):
                    plans = method.plan(Query(geometry, q, k, v))
                    output = block_sparse(q, k, v, plans)
                    assert isinstance(output, torch.Tensor)
                    kept.append(plans.density)
                    decibels.append(psnr(output, truth))
                row = {"method": name, "tokens": recorded[0][0].tokens, "block": block, "asked": density}
                row |= {"density": round(mean(kept), 3), "psnr_db": round(mean(decibels), 2)}
                rows.append(row | {"worst_db": round(min(decibels), 2)})
    return rows


def clusters(name: str, geometry: Geometry, block: int) -> dict[str, int]:
    """svg2's clusters in proportion to the block, as 252 and 76 tokens are to 128."""
    if name != "svg2":
        return {}
    return {
        "q_clusters": max(1, geometry.video // (2 * block)),
        "k_clusters": max(1, 10 * geometry.video // (6 * block)),
    }


def main() -> None:
    """Run, print one JSON document, and keep it beside the other results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also N = 16384, bfloat16 and densities 0.2 and 0.4")
    parser.add_argument("--only", choices=("figures", "times", "quality"), help="one part")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sparse_attention.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [4096, 8192, 16384] if options.full else [4096, 8192]
    dtypes = [torch.float32, torch.bfloat16] if options.full else [torch.float32]
    parts: dict[str, Callable[[], Any]] = {
        "figures": lambda: figures(options.repeats + 4),
        "times": lambda: times(sizes, dtypes, DENSITIES if options.full else DENSITIES[::2], options.repeats),
        "quality": lambda: quality({16: (33, 64, 64), 128: (93, 128, 128)}),
    }
    result = json.loads(options.output.read_text()) if options.only and options.output.exists() else {}
    result["machine"] = {"torch": torch.__version__, "threads": 1, "cpu": platform.machine(), "head_dim": HEAD_DIM}
    for name, part in parts.items():
        if options.only in (None, name):
            print(f"{name} ...", file=sys.stderr)
            with torch.inference_mode():
                result[name] = part()
    text = json.dumps(result, indent=1)
    options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
