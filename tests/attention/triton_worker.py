"""Runs the Triton kernels in Triton's interpreter, on the CPU; started once by conftest.py.

The interpreter is chosen when Triton is imported, for the whole process: hence a process of its own. Prints a JSON
object: case -> numbers.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from diffaccel.attention.calls import Inputs
from diffaccel.attention.kernels import torch_plan, triton_sparse
from diffaccel.attention.kernels.triton_int8 import int8_attention
from diffaccel.attention.plan import BlockPlan, HeadPlans
from diffaccel.attention.sage.int8 import int8_attention_reference
from diffaccel.attention.sage.variants import attend, kernel_of
from tests.attention.cases import (
    full_plan,
    ragged_plans,
    relative_l1,
    tensors,
    token_masks,
    truth,
    with_outliers,
)

CASES: dict[str, Callable[[], dict[str, Any]]] = {}


def case(fn: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Register a case under the function's name."""
    CASES[fn.__name__] = fn
    return fn


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute error over finite truth."""
    there = torch.isfinite(wanted)
    return float((found.double() - wanted)[there].abs().max())


def sparse(dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """Permuted, uneven, partly empty plans, one per head."""
    q, k, v = tensors((1, 2, 200, dim), dtype)
    plans = ragged_plans()
    out, lse = triton_sparse.block_sparse(q, k, v, plans, return_lse=True)
    wanted, wanted_lse = truth(q, k, v, token_masks(plans, 1, 2))
    other, other_lse = torch_plan.block_sparse(q, k, v, plans, return_lse=True)
    empty = torch.isinf(wanted_lse)
    return {
        "error": error(out, wanted),
        "lse_error": error(lse, wanted_lse),
        "torch_error": error(out, other.double()),
        "torch_lse_error": error(lse, other_lse.double()),
        "empty": int(empty.sum()),
        "empty_ok": bool((out[empty] == 0).all()) and torch.equal(torch.isneginf(lse), empty),
        "dtype": str(out.dtype),
    }


for _dtype in (torch.float32, torch.float16, torch.bfloat16):
    for _dim in (64, 96, 128):
        CASES[f"sparse {str(_dtype).removeprefix('torch.')} {_dim}"] = lambda a=_dtype, b=_dim: sparse(a, b)


@case
def lengths() -> dict[str, Any]:
    """C49: all blocks kept, lengths that no block divides; and what zeros as padding would have done."""
    found = {}
    for tokens in (100, 127, 129):
        q, k, v = tensors((1, 1, tokens, 64))
        found[str(tokens)] = error(triton_sparse.block_sparse(q, k, v, full_plan(tokens)), truth(q, k, v)[0])
    q, k, v = tensors((1, 1, 100, 64))
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 28)) for x in (q, k, v)]
    out = triton_sparse.block_sparse(*padded, full_plan(128))[:, :, :100]
    return {**found, "zeros": error(out, truth(q, k, v)[0])}


@case
def shapes() -> dict[str, Any]:
    """Two samples, grouped heads, views of another layout, another scale, more keys than a tile."""
    q, k, v = tensors((2, 140, 4, 64))
    q, k, v = q.transpose(1, 2), k[:, :, :2].transpose(1, 2), v[:, :, :2].transpose(1, 2)
    before = [x.clone() for x in (q, k, v)]
    out = triton_sparse.block_sparse(q, k, v, full_plan(140), scale=0.3)
    return {"error": error(out, truth(q, k, v, scale=0.3)[0]), "default": error(out, truth(q, k, v)[0]),
            "kept": all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))}  # fmt: skip


@case
def not_a_number() -> dict[str, Any]:
    """What is broken in the inputs shows in the output."""
    q, k, v = tensors((1, 1, 80, 64))
    q[0, 0, 5] = float("nan")
    out = triton_sparse.block_sparse(q, k, v, full_plan(80))
    bad = torch.isnan(out).all(-1)[0, 0]
    return {"rows": bad.nonzero()[:, 0].tolist(), "others": bool(torch.isfinite(out[0, 0][~bad]).all())}


@case
def no_keys_at_all() -> dict[str, Any]:
    """A plan that keeps nothing."""
    q, k, v = tensors((1, 1, 80, 64))
    even = full_plan(80).plans[0].queries
    nothing = BlockPlan.of_mask(torch.zeros(even.count, even.count, dtype=torch.bool), even, even)
    out, lse = triton_sparse.block_sparse(q, k, v, HeadPlans((nothing,)), return_lse=True)
    return {"zero": not out.any(), "lse": bool(torch.isneginf(lse).all())}


@case
def eight_bits() -> dict[str, Any]:
    """Our INT8 kernel against its reference and against float64."""
    found: dict[str, Any] = {}
    for dtype, dim, keys in ((torch.float32, 64, 77), (torch.float16, 96, 200), (torch.bfloat16, 128, 256)):
        q, k, v = tensors((1, 2, 150, dim), torch.float32, keys)
        q, k, v = q.to(dtype), with_outliers(k)[:, :1].to(dtype), v[:, :1].to(dtype)
        before = k.clone()
        out, lse = int8_attention(q, k, v, return_lse=True)
        same, same_lse = int8_attention_reference(q, k, v, return_lse=True)
        wanted, wanted_lse = truth(q, k, v)
        plain = int8_attention(q, k, v, smooth_k=False)
        found[f"{dim}"] = {
            "reference": error(out.float(), same.double()),
            "reference_lse": error(lse, same_lse.double()),
            "l1": relative_l1(out, wanted),
            "l1_unsmoothed": relative_l1(plain, wanted),
            "lse": error(lse, wanted_lse),
            "kept": torch.equal(k, before),
        }
    return found


def version_1() -> Callable[..., Any]:
    """sageattention 1.0.6's own function and kernels, without its assertion that tensors are on a GPU."""
    import sageattention.core as core

    source = inspect.getsource(core.sageattn)
    line = 'assert q.is_cuda, "Input tensors must be on cuda."'
    assert line in source
    space = dict(vars(core))
    exec(source.replace(line, "pass"), space)
    function: Callable[..., Any] = space["sageattn"]
    return function


@case
def sage_1() -> dict[str, Any]:
    """sageattention 1.0.6 itself: what it does to keys and tails, and our adapter around it."""
    kernel, found = version_1(), {}
    for keys in (77, 256):
        q, k, v = tensors((1, 2, 128, 64), torch.float16, keys)
        k = with_outliers(k)
        wanted = truth(q, k, v)[0]
        bare = k.clone()
        theirs = kernel(q, bare, v, tensor_layout="HND")
        inputs = Inputs(*(x.transpose(1, 2) for x in (q, k, v)))
        before = k.clone()
        ours = attend("1", kernel, inputs, (keys,)).transpose(1, 2)
        found[str(keys)] = {
            "theirs": relative_l1(theirs, wanted),
            "ours": relative_l1(ours, wanted),
            "cosine": float(torch.nn.functional.cosine_similarity(theirs.double(), wanted, dim=-1).mean()),
            "they_wrote": not torch.equal(bare, before),
            "we_wrote": not torch.equal(k, before),
        }
    return found


@case
def masks() -> dict[str, Any]:
    """C45 for the kernels that run here: a mask that hides half of the keys."""
    found = {}
    q, k, v = (x.transpose(1, 2) for x in tensors((1, 4, 128, 64), torch.float16))
    mask = torch.zeros(1, 1, 1, 128, dtype=torch.bool)
    mask[..., :64] = True
    wanted = truth(*(x.transpose(1, 2) for x in (q, k, v)), mask)[0]
    unmasked = truth(*(x.transpose(1, 2) for x in (q, k, v)))[0]
    for variant, kernel in (
        ("1", version_1()),
        ("triton", kernel_of("triton")),
        ("reference", kernel_of("reference")),
    ):
        out = attend(variant, kernel, Inputs(q, k, v, mask), (64,)).transpose(1, 2)
        found[variant] = {"masked": relative_l1(out, wanted), "unmasked": relative_l1(out, unmasked)}
    return found


@case
def hard_numbers() -> dict[str, Any]:
    """C48: queries and keys of a few hundred, one row of zeros, float16."""
    found = {}
    q, k, v = (x.transpose(1, 2) for x in tensors((1, 2, 128, 64), torch.float32))
    q, k, v = (q * 300).half(), (k * 300).half(), v.half()
    q[:, 7] = k[:, 9] = 0
    wanted = truth(*(x.transpose(1, 2) for x in (q, k, v)))[0]
    for variant, kernel in (
        ("1", version_1()),
        ("triton", kernel_of("triton")),
        ("reference", kernel_of("reference")),
    ):
        out = attend(variant, kernel, Inputs(q, k, v), (128,)).transpose(1, 2)
        found[variant] = {"finite": bool(torch.isfinite(out).all()), "l1": relative_l1(out, wanted)}
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({name: run() for name, run in CASES.items()}))
