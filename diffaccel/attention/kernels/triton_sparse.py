"""Block-sparse attention on a GPU: a Triton kernel that walks the tiles of a block plan.

Not run on a GPU by us: numerics are tested in Triton's interpreter, and the compiled code for six architectures only
for its size (tests/attention/).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from typing import Any

import torch

from ...errors import InvalidOptionError
from ..plan import HeadPlans
from .tables import Tables, tables
from .tiles import LOWEST, Tile, tile

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128


def lacks(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the Triton kernels cannot run there, in a clause; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if dtype not in DTYPES:
        return f"the Triton kernels take float16, bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"the Triton kernels take a head_dim of at most {MAX_HEAD_DIM}, not {head_dim}"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"the Triton kernels need a CUDA device, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST:
        return f"the Triton kernels need compute capability 8.0, the device has {'.'.join(map(str, capability))}"
    return None


def interpreted() -> bool:
    """Whether Triton runs our kernels in its interpreter (TRITON_INTERPRET=1), on tensors of any device."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import JITFunction

    from . import triton_code

    return not isinstance(triton_code.block_sparse_kernel, JITFunction)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def precision(dtype: torch.dtype) -> str:
    """How float32 numbers are multiplied: exactly, unless PyTorch itself is allowed TF32 (10 bits of mantissa).

    That is `torch.set_float32_matmul_precision`, "highest" unless the user says otherwise. 16-bit numbers are
    multiplied exactly either way, and all sums are in float32.
    """
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


def cut(kind: str, device: torch.device) -> Tile:
    """The tile for the device; the smallest in the interpreter."""
    return tile(kind, None if device.type != "cuda" else torch.cuda.get_device_capability(device))


def width(head_dim: int) -> int:
    """The power of 2 (at least 16, for tensor cores) that head_dim is padded to inside the kernel."""
    return max(16, 1 << (head_dim - 1).bit_length())


def block_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plans: HeadPlans,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    shape: Tile | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the kept blocks of `plans`.

    Args:
        q: [B, H, Nq, D], any strides but a contiguous last dimension (made so where it is not); D at most 128.
        k, v: [B, Hkv, Nk, D] with H a multiple of Hkv.
        plans: which key blocks each query block of each head attends to; permutations are followed on load.
        scale: of the scores; 1/sqrt(D) by default.
        return_lse: also return the natural log-sum-exp, float32 [B, H, Nq].
        shape: tile sizes, by default those of `kernels.tiles` for the device.

    Returns:
        [B, H, Nq, D] in the dtype of q (contiguous); a query block with no key blocks gives 0 and -inf.

    Raises:
        InvalidOptionError: shapes that do not fit each other or the plan, or a device, dtype or head_dim that the
            kernel does not take.
    """
    _check(q, k, v, plans)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, queries, dim = q.shape
    shape = shape or cut("four_bytes" if q.dtype == torch.float32 else "two_bytes", q.device)
    lists = tables(plans, batch * heads, shape.queries, shape.keys, q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    _launch(q, k, v, out, lse, lists, dim**-0.5 if scale is None else scale, shape)
    return (out, lse) if return_lse else out


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: Tables,
    scale: float,
    shape: Tile,
) -> None:
    """Write `out` [B, H, Nq, D] and `lse` [B, H, Nq]."""
    from . import triton_code

    batch, heads, queries, dim = q.shape
    unused = lists.rows
    launch = triton_code.block_sparse_kernel[(lists.longest, batch * heads)]
    with on(q.device):
        launch(
            q, k, v, out, lse,
            lists.rows, lists.keys, lists.plans, lists.assign,
            unused if lists.query_order is None else lists.query_order,
            unused if lists.key_order is None else lists.key_order,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            heads, heads // k.shape[1], queries, k.shape[2], scale * math.log2(math.e),
            HEAD_DIM=dim, WIDTH=width(dim), TILE_M=shape.queries, TILE_N=shape.keys,
            ORDER_Q=lists.query_order is not None, ORDER_K=lists.key_order is not None,
            UPCAST=interpreted(), PRECISION=precision(q.dtype),
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plans: HeadPlans) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise InvalidOptionError(f"q must be [B, H, Nq, D] and k, v [B, Hkv, Nk, D], got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise InvalidOptionError(f"q has {q.shape[1]} heads, which is no multiple of the {k.shape[1]} of k and v")
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidOptionError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    for plan in plans.plans:
        if plan.queries.tokens != q.shape[2] or plan.keys.tokens != k.shape[2]:
            raise InvalidOptionError(
                f"the plan is for {plan.queries.tokens} queries and {plan.keys.tokens} keys, got {q.shape[2]} and "
                f"{k.shape[2]}"
            )
    if plans.assign is not None and tuple(plans.assign.shape) != tuple(q.shape[:2]):
        raise InvalidOptionError(f"plans.assign is {tuple(plans.assign.shape)}, must be {tuple(q.shape[:2])}")
    reason = lacks(q.device, q.dtype, q.shape[3])
    if reason is not None:
        raise InvalidOptionError(reason)
