"""The Triton kernels. Importing this file imports Triton; the files beside it do so only when a kernel is called.

Source of the tiled softmax: FlashAttention-2, arXiv 2307.08691, algorithm 1 (forward), here over lists of key tiles.
Source of 8-bit scores with smoothed keys: SageAttention, arXiv 2410.02367, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _step(acc, total, top, scores, v, UPCAST: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of keys into the running softmax: scores [M, N] in units of log2, hidden ones -inf; v [N, D]."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.math.exp2(scores - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    if UPCAST:
        v = v.to(tl.float32)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, total, new_top


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scores(q, k, in_n, scale_log2, UPCAST: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """[M, N] in units of log2 of q [M, D] and k [D, N]; keys that are not `in_n` [N] count as hidden."""
    if UPCAST:
        k = k.to(tl.float32)
    return tl.where(in_n[None, :], tl.dot(q, k, input_precision=PRECISION) * scale_log2, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store(out_at, lse_at, acc, total, top, in_m, in_d):  # type: ignore[no-untyped-def]
    """Write output [M, D] and natural log-sum-exp [M]; a row that saw no key gives 0 and -inf."""
    seen = total > 0
    out = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    lse = tl.where(seen, (top + tl.math.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    # A NaN total (NaN or infinite inputs) is not > 0, but must not look like an empty row.
    broken = total != total
    out = tl.where(broken[:, None], total[:, None], out)
    tl.store(out_at, out.to(out_at.dtype.element_ty), in_m[:, None] & in_d[None, :])
    tl.store(lse_at, tl.where(broken, total, lse), in_m)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def block_sparse_kernel(  # type: ignore[no-untyped-def]
    Q, K, V, Out, Lse,
    Rows, Keys, Plans, Assign, QueryOrder, KeyOrder,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads, group, queries, keys, scale_log2,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    ORDER_Q: tl.constexpr, ORDER_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head over the key tiles of its row.

    Strides (b, h, n) count elements, the last dimension is contiguous; WIDTH is HEAD_DIM rounded up to a power of 2.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    plan = tl.load(Assign + head)
    if tile >= tl.load(Plans + plan * 2 + 1):
        return
    row = Rows + (tl.load(Plans + plan * 2) + tile) * 4
    first, end, begin, stop = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    batch, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    kv = h // group

    d = tl.arange(0, WIDTH)
    in_d = d < HEAD_DIM
    at = first + tl.arange(0, TILE_M)
    in_m = at < end
    if ORDER_Q:
        at = tl.load(QueryOrder + plan.to(tl.int64) * queries + at, mask=in_m, other=0)
    at = at.to(tl.int64)
    q = tl.load(Q + batch * q_b + h * q_h + at[:, None] * q_n + d[None, :], in_m[:, None] & in_d[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    K += batch * k_b + kv * k_h
    V += batch * v_b + kv * v_h

    acc = tl.zeros([TILE_M, WIDTH], tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    for i in range(begin, stop):
        n = tl.load(Keys + i * 2) + tl.arange(0, TILE_N)
        in_n = n < tl.load(Keys + i * 2 + 1)
        if ORDER_K:
            n = tl.load(KeyOrder + plan.to(tl.int64) * keys + n, mask=in_n, other=0)
        n = n.to(tl.int64)
        k = tl.load(K + n[None, :] * k_n + d[:, None], in_n[None, :] & in_d[:, None], other=0.0)
        v = tl.load(V + n[:, None] * v_n + d[None, :], in_n[:, None] & in_d[None, :], other=0.0)
        scores = _scores(q, k, in_n, scale_log2, UPCAST, PRECISION)
        acc, total, top = _step(acc, total, top, scores, v, UPCAST, PRECISION)

    out_at = Out + batch * o_b + h * o_h + at[:, None] * o_n + d[None, :]
    _store(out_at, Lse + head.to(tl.int64) * queries + at, acc, total, top, in_m, in_d)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def int8_kernel(  # type: ignore[no-untyped-def]
    Q, K, V, Out, Lse, QScale, KScale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads, group, queries, keys, q_blocks, k_blocks,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK_Q: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dense attention from 8-bit queries and keys; V in its own precision, sums in float32.

    QScale [B, H, q_blocks] (with the softmax scale and log2 e in it) per BLOCK_Q queries, a multiple of TILE_M;
    KScale [B, Hkv, k_blocks] per TILE_N keys. Keys behind the last are hidden, not read as zeros.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    batch, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    kv = h // group
    kv_head = batch * (heads // group) + kv

    d = tl.arange(0, WIDTH)
    in_d = d < HEAD_DIM
    at = (tile * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    in_m = at < queries
    q = tl.load(Q + batch * q_b + h * q_h + at[:, None] * q_n + d[None, :], in_m[:, None] & in_d[None, :], other=0)
    q_scale = tl.load(QScale + head.to(tl.int64) * q_blocks + tile * TILE_M // BLOCK_Q)
    K += batch * k_b + kv * k_h
    V += batch * v_b + kv * v_h
    KScale += kv_head * k_blocks

    acc = tl.zeros([TILE_M, WIDTH], tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    for begin in range(0, keys, TILE_N):
        n = (begin + tl.arange(0, TILE_N)).to(tl.int64)
        in_n = n < keys
        k = tl.load(K + n[None, :] * k_n + d[:, None], in_n[None, :] & in_d[:, None], other=0)
        v = tl.load(V + n[:, None] * v_n + d[None, :], in_n[:, None] & in_d[None, :], other=0.0)
        scores = tl.dot(q, k).to(tl.float32) * (q_scale * tl.load(KScale + begin // TILE_N))
        scores = tl.where(in_n[None, :], scores, float("-inf"))
        acc, total, top = _step(acc, total, top, scores, v, UPCAST, PRECISION)

    out_at = Out + batch * o_b + h * o_h + at[:, None] * o_n + d[None, :]
    _store(out_at, Lse + head.to(tl.int64) * queries + at, acc, total, top, in_m, in_d)
