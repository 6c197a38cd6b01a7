"""Launching the Triton kernels for an `SvdQuantLinear`; part by part, the branch and the bias with the last one."""

from __future__ import annotations

from typing import Any

import torch

from .formats import SHIFT
from .linear import SvdQuantLinear, low_rank_input, with_extra

Tensor = torch.Tensor
Ends = tuple[Tensor | None, Tensor | None]  # what the last part adds: low-rank input, bias

BM, BN, BK = 64, 64, 64
WARPS, STAGES = 4, 3
MOST_RANK = 256  # of the branch in one tile; beyond it the branch is added by torch


def run_triton(linear: SvdQuantLinear, x: Tensor, upcast: bool = False) -> Tensor:
    """4-bit weights, activations in 16 bits: more exact than 4-bit activations, and less memory traffic."""
    return _run(linear, x, False, upcast)


def run_triton_int8(linear: SvdQuantLinear, x: Tensor, upcast: bool = False) -> Tensor:
    """INT4 weights with activations in 8 bits, products on integer matrix units (NVFP4 parts: 16 bits)."""
    return _run(linear, x, True, upcast)


def _run(linear: SvdQuantLinear, x: Tensor, int8: bool, upcast: bool) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    rank = linear.proj_up.shape[1]
    fused = 0 < rank <= MOST_RANK
    low = low_rank_input(linear, flat).contiguous()
    out = torch.empty(len(flat), linear.out_features, dtype=x.dtype, device=x.device)
    start, last = 0, len(linear.svdq.parts) - 1
    for index, info in enumerate(linear.svdq.parts):
        piece = flat[:, start : start + info.columns]
        ends = (low if fused else None, linear.bias) if index == last else (None, None)
        if len(flat):
            _part(linear, index, piece, out, ends, int8 and info.precision == "int4", index > 0, upcast)
        start += info.columns
    if rank and not fused:
        out = out + torch.nn.functional.linear(low, linear.proj_up.to(x.dtype))
    out = with_extra(linear, flat, out)
    return out.reshape(*x.shape[:-1], linear.out_features)


def _part(
    linear: SvdQuantLinear,
    index: int,
    x: Tensor,
    out: Tensor,
    end: Ends,
    int8: bool,
    add: bool,
    upcast: bool,
) -> None:
    from . import triton_code as kernels

    info = linear.svdq.parts[index]
    codes, scales, smooth = (linear.tensor(name, index) for name in ("qweight", "wscales", "smooth_factor"))
    low, bias = end
    rank = 0 if low is None else max(16, 1 << (low.shape[1] - 1).bit_length())
    m, n, k = len(x), linear.out_features, info.columns
    groups = scales.shape[1]
    shift = SHIFT if info.unsigned else 0.0
    dummy = out
    shared: dict[str, Any] = {"RANK": rank, "HAS_BIAS": bias is not None, "ADD": add, "UPCAST": upcast}
    tile = {"BM": BM, "BN": BN, "num_warps": WARPS, "num_stages": STAGES}
    ends = (dummy if low is None else low, linear.proj_up, dummy if bias is None else bias, out)
    width = 0 if low is None else low.shape[1]
    grid = (-(-m // BM), -(-n // BN))
    if int8:
        xq = torch.empty(m, groups * 64, dtype=torch.int8, device=x.device)
        xs = torch.empty(m, groups, dtype=torch.float32, device=x.device)
        rows = (-(-m // BM), groups)
        kernels.quantize_rows[rows](x, smooth, xq, xs, m, k, x.stride(0), groups, shift, BM=BM, GROUP=64)
        kernels.w4a8[grid](xq, xs, codes, scales, *ends, m, n, groups, width, GROUP=64, **shared, **tile)
        return
    nvfp4 = info.precision == "nvfp4"
    channel = linear.tensor("wcscales", index) if nvfp4 else dummy
    args = (x, codes, scales, channel, smooth, *ends, m, n, k, x.stride(0), groups, shift, width)
    kernels.w4a16[grid](*args, NVFP4=nvfp4, BK=BK, **shared, **tile)
