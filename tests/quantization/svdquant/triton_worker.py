"""Runs the Triton kernels in Triton's interpreter (argv: "interpret" and "all" or "few"), or compiles them for GPU
architectures (argv: "ptx" and a JSON list of [capability, kernel, rank]); a process of its own. Prints JSON.

The interpreter multiplies bf16 tiles wrongly, hence `upcast` there.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import nn


def interpret(which: str) -> dict[str, Any]:
    from diffaccel.quantization.svdquant.linear import install
    from diffaccel.quantization.svdquant.math import Recipe, quantize_layer, reference_forward
    from diffaccel.quantization.svdquant.triton_run import run_triton, run_triton_int8

    found: dict[str, Any] = {}
    for precision in ("int4", "nvfp4"):
        for label, splits in {"one": (), "two": ((64, False), (136, True))}.items():
            sizes = ((5, True), (70, False))
            few = sizes[:1] if (label == "one") == (precision == "int4") else sizes[1:]
            for rows, bias in sizes if which == "all" else few:
                torch.manual_seed(0)
                linear = nn.Linear(200, 70, bias=bias).requires_grad_(False)
                x = torch.randn(1, rows, 200)
                layer, _ = quantize_layer(
                    linear.weight, linear.bias, Recipe(precision, 20, (0.5,)), x.abs().amax((0, 1)), None, splits
                )
                install(linear, layer)
                down, up = torch.randn(3, 200) / 10, torch.randn(70, 3) / 10
                linear.with_extra_branch("extra", down, up, 0.5)
                branch = 0.5 * (x @ down.T) @ up.T
                wanted = reference_forward(x, layer, act=False) + branch

                def error(out: torch.Tensor, wanted: torch.Tensor = wanted) -> float:
                    return float((out.float() - wanted).norm() / wanted.norm())

                half = run_triton(linear, x.bfloat16(), upcast=True)
                found[f"{precision} {label} {rows}"] = {
                    "16": error(run_triton(linear, x, upcast=True)),
                    "8": error(run_triton_int8(linear, x, upcast=True)),
                    "strided": error(run_triton(linear, torch.cat((x, x), -1)[..., :200], upcast=True)),
                    "empty": list(run_triton(linear, x[:, :0], upcast=True).shape),
                    "bf16": error(half),
                    "dtype": str(half.dtype),
                }
    return found


POINTERS = {"codes": "*u8", "xq": "*i8", "xs": "*fp32"}
NUMBERS = {"SHIFT": "fp32", **dict.fromkeys(("M", "N", "K", "X_STRIDE", "GROUPS", "R"), "i32")}


def compiled(capability: int, kernel: str, rank: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from diffaccel.quantization.svdquant import triton_code as code
    from diffaccel.quantization.svdquant import triton_run as run

    nvfp4 = kernel == "nvfp4"
    fn = {"int4": code.w4a16, "nvfp4": code.w4a16, "int8": code.w4a8}[kernel]
    fixed: dict[str, Any] = {"RANK": rank, "HAS_BIAS": True, "ADD": True, "UPCAST": False, "BM": run.BM, "BN": run.BN}
    fixed |= {"GROUP": 64} if kernel == "int8" else {"NVFP4": nvfp4, "BK": run.BK}
    types = {}
    for name in fn.arg_names:
        known = NUMBERS.get(name) or POINTERS.get(name, "*bf16")
        types[name] = "constexpr" if name in fixed else "*u8" if nvfp4 and name == "scales" else known
    constants = {(fn.arg_names.index(name),): value for name, value in fixed.items()}
    made = triton.compile(
        ASTSource(fn, signature=types, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": run.WARPS, "num_stages": run.STAGES},
    )
    ptx = made.asm["ptx"]
    return {"shared": made.metadata.shared, "mma": "mma" in ptx, "target": f"sm_{capability}" in ptx}


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        print(json.dumps(interpret(sys.argv[2])))
    else:
        print(json.dumps([compiled(*case) for case in json.loads(sys.argv[2])]))
