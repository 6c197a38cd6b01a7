"""Compiles the Triton kernels for GPU architectures, on a machine without a GPU; started by test_ptx.py.

Reads a JSON list of {kernel, capability, dtype, head_dim, precision} from argv and prints one with the shared memory,
registers spilled and tensor-core instructions of each. Must not run under TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diffaccel.attention.kernels import triton_code
from diffaccel.attention.kernels.tiles import Tile, tile
from diffaccel.attention.kernels.triton_sparse import width
from diffaccel.attention.sage.int8 import BLOCK_QUERIES

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
UNALIGNED = ("heads", "group", "queries", "keys", "q_blocks", "k_blocks")  # any whole number, as in a ragged call


def pointers(kernel: str, dtype: str) -> dict[str, str]:
    """Type of every pointer argument."""
    number = f"*{TYPES[dtype]}"
    scores = "*i8" if kernel == "int8_kernel" else number
    lists = dict.fromkeys(("Rows", "Keys", "Plans", "Assign", "QueryOrder", "KeyOrder"), "*i32")
    return {"Q": scores, "K": scores, "V": number, "Out": number, "Lse": "*fp32", "QScale": "*fp32",
            "KScale": "*fp32", **lists}  # fmt: skip


def constants(case: dict[str, Any], shape: Tile) -> dict[str, Any]:
    """Value of every constexpr argument."""
    found = {"HEAD_DIM": case["head_dim"], "WIDTH": width(case["head_dim"]), "TILE_M": shape.queries,
             "TILE_N": shape.keys, "UPCAST": False, "PRECISION": case.get("precision", "ieee")}  # fmt: skip
    found |= dict.fromkeys(case.get("ones", ()), 1)  # Triton makes arguments that are 1 constants
    if case["kernel"] == "int8_kernel":
        return found | {"BLOCK_Q": BLOCK_QUERIES}
    return found | {"ORDER_Q": case.get("order", True), "ORDER_K": case.get("order", True)}


def compiled(case: dict[str, Any]) -> dict[str, Any]:
    """One case, compiled down to machine code by the bundled ptxas."""
    kernel = getattr(triton_code, case["kernel"])
    wide = case["dtype"] == "float32"
    kinds = {"int8_kernel": ("int8", "int8_four_bytes"), "block_sparse_kernel": ("two_bytes", "four_bytes")}
    kind = kinds[case["kernel"]][wide]
    capability = tuple(case["capability"])
    shape = Tile(*case["tile"]) if "tile" in case else tile(kind, capability)
    fixed = constants(case, shape)
    typed = pointers(case["kernel"], case["dtype"]) | {"scale_log2": "fp32"}
    signature = {name: "constexpr" if name in fixed else typed.get(name, "i32") for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names)
               if name not in UNALIGNED and name not in fixed and name != "scale_log2"]  # fmt: skip
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in fixed.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    started = time.perf_counter()
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    binary = triton.compile(source, target=target, options={"num_warps": shape.warps, "num_stages": shape.stages})
    ptx = binary.asm["ptx"]
    return {
        **case,
        "shared": binary.metadata.shared,
        "cubin": len(binary.asm["cubin"]),
        "tensor": sorted(set(re.findall(r"(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx))),
        "int8": ".s8" in ptx or ".i8" in ptx.replace("kind::", "."),
        "target": re.search(r"\.target (\w+)", ptx)[1],  # type: ignore[index]
        "seconds": round(time.perf_counter() - started, 2),
    }


if __name__ == "__main__":
    print(json.dumps([compiled(case) for case in json.loads(sys.argv[1])]))
