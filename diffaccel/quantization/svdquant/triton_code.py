"""Triton kernels of `SvdQuantLinear`: 4-bit weights times 16-bit or 8-bit activations, low-rank branch included.

Triton has no 4-bit matrix product: codes are expanded to 16 or 8 bits in registers. What is saved is memory (and its
traffic: small batches gain); large products take about the time of the type they are expanded to. Importing this
module imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _expand(packed, NVFP4: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes [BN, BK/2] -> values of the codes, [BN, BK] float32."""
    codes = tl.interleave(packed & 15, packed >> 4).to(tl.int32)
    if NVFP4:
        m = codes & 7
        exponent = (1 << (m >> 1)).to(tl.float32) * 0.25
        magnitude = tl.where(m < 2, m.to(tl.float32) * 0.5, (2 + (m & 1)).to(tl.float32) * exponent)
        return tl.where(codes >= 8, -magnitude, magnitude)
    return ((codes ^ 8) - 8).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _e4m3(bits):  # type: ignore[no-untyped-def]
    """Bits of positive float8_e4m3fn numbers -> float32 (by arithmetic: older GPUs do not know the type)."""
    b = bits.to(tl.int32)
    e = (b >> 3) & 15
    m = (b & 7).to(tl.float32)
    return tl.where(e == 0, m * 0.001953125, (8.0 + m) * tl.exp2((e - 10).to(tl.float32)))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _epilogue(  # type: ignore[no-untyped-def]
    acc, low, up, bias, out, rows, cols, M, N, R,
    RANK: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc [BM, BN] + low up^T + bias (+ what `out` holds already) -> out. `low` is [M, R], `up` [N, R]."""
    here = (rows[:, None] < M) & (cols[None, :] < N)
    where = out + rows[:, None] * N + cols[None, :]
    if RANK > 0:
        r = tl.arange(0, RANK)
        a = tl.load(low + rows[:, None] * R + r[None, :], mask=(rows[:, None] < M) & (r[None, :] < R), other=0.0)
        b = tl.load(up + cols[None, :] * R + r[:, None], mask=(cols[None, :] < N) & (r[:, None] < R), other=0.0)
        if UPCAST:
            acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(a, b.to(a.dtype), acc)
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if ADD:
        acc += tl.load(where, mask=here, other=0.0).to(tl.float32)
    tl.store(where, acc.to(out.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def w4a16(  # type: ignore[no-untyped-def]
    x, codes, scales, channel, smooth, low, up, bias, out, M, N, K, X_STRIDE, GROUPS, SHIFT, R,
    NVFP4: tl.constexpr, RANK: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [M, N] = ((x + SHIFT) / smooth) q(R)^T + low up^T + bias, activations in the dtype of x.

    x [M, K] with row stride X_STRIDE; codes [N, K'/2] bytes, scales [N, GROUPS] (float8 bits for NVFP4, with channel
    [N]), smooth [K]. BK is 64: one group of int4, four of nvfp4.
    """
    GROUP: tl.constexpr = 16 if NVFP4 else 64
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        tile = tl.load(
            x + rows[:, None] * X_STRIDE + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0
        )
        s = tl.load(smooth + k, mask=k < K, other=1.0).to(tl.float32)
        a = (tile.to(tl.float32) + SHIFT) / s[None, :]
        a = tl.where(k[None, :] < K, a, 0.0)
        byte = start // 2 + tl.arange(0, BK // 2)
        inside = (cols[:, None] < N) & (byte[None, :] < GROUPS * (GROUP // 2))
        packed = tl.load(codes + cols[:, None] * (GROUPS * (GROUP // 2)) + byte[None, :], mask=inside, other=0)
        g = start // GROUP + tl.arange(0, BK // GROUP)
        known = (cols[:, None] < N) & (g[None, :] < GROUPS)
        if NVFP4:
            sc = _e4m3(tl.load(scales + cols[:, None] * GROUPS + g[None, :], mask=known, other=0))
        else:
            sc = tl.load(scales + cols[:, None] * GROUPS + g[None, :], mask=known, other=0.0).to(tl.float32)
        wide = tl.reshape(tl.broadcast_to(sc[:, :, None], (BN, BK // GROUP, GROUP)), (BN, BK))
        w = _expand(packed, NVFP4) * wide
        if UPCAST:
            acc += tl.dot(a, tl.trans(w), input_precision="ieee")
        else:
            acc = tl.dot(a.to(tile.dtype), tl.trans(w).to(tile.dtype), acc)
    if NVFP4:
        acc *= tl.load(channel + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    _epilogue(acc, low, up, bias, out, rows, cols, M, N, R, RANK, HAS_BIAS, ADD, UPCAST)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def quantize_rows(x, smooth, codes, scales, M, K, X_STRIDE, GROUPS, SHIFT, BM: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(x + SHIFT) / smooth per token and group as int8: codes [M, GROUPS * GROUP], scales [M, GROUPS] float32."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    g = tl.program_id(1)
    k = g * GROUP + tl.arange(0, GROUP)
    inside = (rows[:, None] < M) & (k[None, :] < K)
    s = tl.load(smooth + k, mask=k < K, other=1.0).to(tl.float32)
    a = (tl.load(x + rows[:, None] * X_STRIDE + k[None, :], mask=inside, other=0.0).to(tl.float32) + SHIFT) / s[
        None, :
    ]
    a = tl.where(inside, a, 0.0)
    top = tl.max(tl.abs(a), axis=1)
    scale = tl.where(top > 0, top / 127.0, 1.0)
    q = a / scale[:, None]
    q = tl.where(q >= 0, q + 0.5, q - 0.5).to(tl.int32)  # truncation: rounds to nearest, halves outwards
    tl.store(codes + rows[:, None] * (GROUPS * GROUP) + k[None, :], q.to(tl.int8), mask=rows[:, None] < M)
    tl.store(scales + rows * GROUPS + g, scale, mask=rows < M)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def w4a8(  # type: ignore[no-untyped-def]
    xq, xs, codes, scales, low, up, bias, out, M, N, GROUPS, R,
    RANK: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As `w4a16` for int4, with activations that `quantize_rows` has made int8: products of 8-bit integers."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for g in range(0, GROUPS):
        k = g * GROUP + tl.arange(0, GROUP)
        a = tl.load(xq + rows[:, None] * (GROUPS * GROUP) + k[None, :], mask=rows[:, None] < M, other=0)
        byte = g * (GROUP // 2) + tl.arange(0, GROUP // 2)
        packed = tl.load(
            codes + cols[:, None] * (GROUPS * (GROUP // 2)) + byte[None, :], mask=cols[:, None] < N, other=0
        )
        w = ((tl.interleave(packed & 15, packed >> 4) ^ 8).to(tl.int8) - 8).to(tl.int8)
        sa = tl.load(xs + rows * GROUPS + g, mask=rows < M, other=0.0)
        sw = tl.load(scales + cols * GROUPS + g, mask=cols < N, other=0.0).to(tl.float32)
        product = tl.dot(a, tl.trans(w), out_dtype=tl.int32)
        acc += product.to(tl.float32) * sa[:, None] * sw[None, :]
    _epilogue(acc, low, up, bias, out, rows, cols, M, N, R, RANK, HAS_BIAS, ADD, UPCAST)
