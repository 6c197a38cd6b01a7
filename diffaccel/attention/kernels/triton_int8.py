"""8-bit attention on a GPU: our own Triton kernel for SageAttention's first scheme.

Not run on a GPU by us; tested as `triton_sparse` is.
"""

from __future__ import annotations

import torch

from ..sage.int8 import BLOCK_KEYS, BLOCK_QUERIES, quantize
from .tiles import Tile
from .triton_sparse import cut, interpreted, on, precision, width


def int8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    shape: Tile | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with Q and K in 8 bits; arguments, result and errors as `int8.int8_attention_reference`.

    V keeps its own precision and sums are in float32: no overflow of half-precision accumulators (the black pictures
    of the original kernels).
    """
    q8, k8 = quantize(q, k, scale, smooth_k, want_shift=return_lse)
    v = v if v.stride(-1) == 1 else v.contiguous()
    batch, heads, queries, dim = q.shape
    shape = shape or cut("int8_four_bytes" if v.dtype == torch.float32 else "int8", q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    from . import triton_code

    if shape.keys != BLOCK_KEYS or BLOCK_QUERIES % shape.queries:
        raise ValueError(f"tiles of {shape} do not fit the blocks of the scales")
    launch = triton_code.int8_kernel[(-(-queries // shape.queries), batch * heads)]
    with on(q.device):
        launch(
            q8.values, k8.values, v, out, lse, q8.scales, k8.scales,
            *q8.values.stride()[:3], *k8.values.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            heads, heads // k.shape[1], queries, k.shape[2], q8.scales.shape[2], k8.scales.shape[2],
            HEAD_DIM=dim, WIDTH=width(dim), TILE_M=shape.queries, TILE_N=shape.keys,
            BLOCK_Q=BLOCK_QUERIES, UPCAST=interpreted(), PRECISION=precision(v.dtype),
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    if not return_lse:
        return out
    return out, lse if q8.shift is None else lse + q8.shift
