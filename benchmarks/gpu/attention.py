"""Attention kernels on a GPU, over sequence length and density: seconds, ratio to dense SDPA, and error.

`python benchmarks/gpu/attention.py --tokens 16384 32760 75600 --out attention.json`. Dense: PyTorch's SDPA, diffusers'
backends, the 8-bit variants. Block-sparse: the kernels of `attention.kernels` on a band of blocks (as SVG's) and on
the same band under a random permutation of the tokens (as SVG2's). The error is relative L1 against float64 on some
rows, K with a bias per channel and four channels at +30; that of SDPA in the same dtype stands beside it.
Not run on a GPU by us; `--device cpu --tokens 512 --head-dim 64` shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from diffaccel.attention.backends import BACKENDS, SAGE, unfit, unfit_call
from diffaccel.attention.calls import Inputs
from diffaccel.attention.kernels import KERNELS
from diffaccel.attention.plan import BlockPlan, Blocks, HeadPlans
from diffaccel.attention.sage.variants import attend, kernel_of
from diffaccel.core.compat import attention_backends, dispatch_attention
from diffaccel.errors import DiffaccelError
from diffaccel.ledger.hardware import detect

Run = Callable[[], torch.Tensor]  # -> [B, H, N, D]
ROWS = 128  # rows of queries whose error is taken


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4608, 16384, 32760])
    parser.add_argument("--density", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.5, 1.0])
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", help="beginnings of kernel names")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def tensors(args: argparse.Namespace, tokens: int) -> list[torch.Tensor]:
    """q, k, v [1, H, N, D]."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, args.heads, tokens, args.head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    bias = torch.randn(args.head_dim, generator=generator) * 5
    bias[:4] = 30
    return [x.to(args.device, getattr(torch, args.dtype)) for x in (q, k + bias, v)]


def plan(args: argparse.Namespace, tokens: int, density: float, permuted: bool) -> HeadPlans:
    """A band of blocks around the diagonal of about that density; one plan for all heads."""
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)) if permuted else None
    blocks = Blocks.even(tokens, args.block, order)
    n = torch.arange(blocks.count)
    half = next(w for w in range(blocks.count) if ((n[:, None] - n).abs() <= w).double().mean() >= density)
    return HeadPlans((BlockPlan.of_mask((n[:, None] - n).abs() <= half, blocks, blocks),))


def dense(args: argparse.Namespace, qkv: list[torch.Tensor]) -> Iterator[tuple[str, Run | str]]:
    """(name, how to run it or why it cannot)."""
    last = [x.transpose(1, 2) for x in qkv]
    shape, device, hardware = last[0].shape, qkv[0].device.type, detect(qkv[0].device.type)
    for backend in (*BACKENDS.values(), *SAGE.values()):
        sage = SAGE.get(backend.name) is backend
        name = f"sage {backend.name}" if sage else f"backend {backend.name}"
        why = unfit(backend, hardware, args.dtype, args.head_dim) or unfit_call(
            backend, shape, shape, last[0].dtype, device
        )
        if why is not None:
            yield name, why
        elif sage:
            try:
                kernel = kernel_of(backend.name)
            except (ImportError, OSError, RuntimeError, ValueError) as error:
                yield name, str(error)
                continue
            yield (
                name,
                lambda b=backend, k=kernel: attend(b.name, k, Inputs(*last), (shape[1],)).transpose(1, 2),
            )
        else:
            member = attention_backends()[backend.diffusers_name]
            yield name, lambda m=member: dispatch_attention(*last, backend=m).transpose(1, 2)


def sparse(args: argparse.Namespace, qkv: list[torch.Tensor]) -> Iterator[tuple[str, Run | str, HeadPlans]]:
    """(name, how to run it or why it cannot, its plan)."""
    for permuted in (False, True):
        for density in args.density:
            plans = plan(args, qkv[0].shape[2], density, permuted)
            for kernel in KERNELS.values():
                name = f"{kernel.name} {density:g}{' permuted' if permuted else ''}"
                why = kernel.needs(detect(qkv[0].device.type))
                yield name, why or (lambda k=kernel, p=plans: k.run(*qkv, p)), plans


def truth(qkv: list[torch.Tensor], rows: torch.Tensor, plans: HeadPlans | None) -> torch.Tensor:
    """Rows of the exact result, a head at a time: [1, H, rows, D] in float64."""
    q, k, v = qkv
    kept = None if plans is None else row_mask(plans.plans[0], rows).to(q.device)
    parts = []
    for head in range(q.shape[1]):
        scores = q[:, head, rows].double() @ k[:, head].double().transpose(1, 2) * q.shape[-1] ** -0.5
        if kept is not None:
            scores = scores.masked_fill(~kept, -torch.inf)
        parts.append(torch.softmax(scores, -1) @ v[:, head].double())
    return torch.stack(parts, 1)


def row_mask(plan: BlockPlan, rows: torch.Tensor) -> torch.Tensor:
    """[rows, N] what these tokens may see (without the N x N mask)."""
    at = rows if plan.queries.order is None else torch.argsort(plan.queries.order)[rows]
    block = torch.searchsorted(plan.queries.starts.long(), at, right=True) - 1
    wide = plan.block_mask()[block].repeat_interleave(plan.keys.starts.diff().long(), 1)
    if plan.keys.order is None:
        return wide
    mask = torch.empty_like(wide)
    mask[:, plan.keys.order] = wide
    return mask


def seconds(runs: dict[str, Run], rounds: int, cuda: bool) -> dict[str, float]:
    """Median of interleaved rounds; the first one compiles and warms up."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            if number:
                found[name].append(time.perf_counter() - started)
    return {name: median(values) for name, values in found.items()}


def measure(args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Every kernel at one length."""
    qkv = tensors(args, tokens)
    rows = torch.linspace(0, tokens - 1, min(ROWS, tokens)).long()
    candidates: list[tuple[str, Run | str, HeadPlans | None]] = [
        ("sdpa", lambda: F.scaled_dot_product_attention(*qkv), None),
        *((name, run, None) for name, run in dense(args, qkv)),
        *sparse(args, qkv),
    ]
    chosen = [c for c in candidates if c[0] == "sdpa" or not args.only or c[0].startswith(tuple(args.only))]
    runs: dict[str, Run] = {}
    report: dict[str, Any] = {}
    for name, run, plans in chosen:
        if isinstance(run, str):
            report[name] = {"left_out": run}
            continue
        wanted = truth(qkv, rows, plans)
        try:
            output = run()[:, :, rows].double()
        except DiffaccelError as error:
            report[name] = {"left_out": str(error)}
            continue
        runs[name] = run
        report[name] = {"relative_l1": float((output - wanted).abs().sum() / wanted.abs().sum())}
        if plans is not None:
            report[name]["density"] = plans.density
    for name, value in seconds(runs, args.rounds, qkv[0].is_cuda).items():
        report[name]["seconds"] = value
    for name in runs:
        report[name]["times_sdpa"] = report["sdpa"]["seconds"] / report[name]["seconds"]
    return report


if __name__ == "__main__":
    options = parse()
    cuda = torch.device(options.device).type == "cuda"
    document = {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "dtype": options.dtype,
        "heads": options.heads,
        "head_dim": options.head_dim,
        "block": options.block,
        "torch": torch.__version__,
        "tokens": {tokens: measure(options, tokens) for tokens in options.tokens},
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
