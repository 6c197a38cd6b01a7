"""Attention with 8-bit scores: the quantization of Q and K, and the whole computation in plain PyTorch.

Source: SageAttention, arXiv 2410.02367, section 4: subtract from K its mean over the keys (softmax does not see a
shift of a whole row of scores, and the mean is where K's outliers sit), then symmetric INT8 per block of queries and
keys; softmax and P·V stay in floating point. Unlike the paper, P·V is summed in float32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

BLOCK_QUERIES, BLOCK_KEYS = 128, 64  # as the paper's kernel
CHUNK = 2**25  # numbers that are float32 at once while rounding: 128 MiB


@dataclass(frozen=True)
class Quantized:
    """One side of the scores in 8 bits.

    Attributes:
        values: [B, H, N, D] int8, contiguous.
        scales: [B, H, blocks] float32; values * scale is what was there (for Q: times softmax scale and log2 e).
        shift: of Q only: [B, H, N] float32, what smoothing K took from each row's scores (times the softmax scale);
            None where K was not smoothed, or nobody asked.
    """

    values: torch.Tensor
    scales: torch.Tensor
    shift: torch.Tensor | None = None


def per_block(x: torch.Tensor, block: int, mean: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT8 per `block` tokens of x [B, H, N, D]: (int8 [B, H, N, D], float32 scales [B, H, blocks]).

    `mean` [B, H, 1, D] is subtracted first. A block of zeros has scale 1 and stays zeros. Numbers that are not finite
    make the scale so, and the scores NaN.
    """
    batch, heads, tokens, _ = x.shape
    blocks = -(-tokens // block)
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(batch, heads, blocks, dtype=torch.float32, device=x.device)
    for part in _heads_at_a_time(heads, x.numel()):
        piece = x[:, part].float()
        if mean is not None:
            piece = piece - mean[:, part]
        piece = torch.nn.functional.pad(piece, (0, 0, 0, blocks * block - tokens)).unflatten(2, (blocks, block))
        steps = piece.abs().amax((3, 4)) / 127
        steps = torch.where(steps == 0, torch.ones_like(steps), steps)
        rounded = (piece / steps[..., None, None]).round_().clamp_(-127, 127).nan_to_num_(0)
        values[:, part] = rounded.flatten(2, 3)[:, :, :tokens].to(torch.int8)
        scales[:, part] = steps
    return values, scales


@functools.lru_cache(64)
def _heads_at_a_time(heads: int, numbers: int) -> tuple[slice, ...]:
    """So many heads that a float32 copy of them has about CHUNK numbers: all at once could double a model's memory.

    `numbers` are those of the whole tensor.
    """
    step = max(1, CHUNK * heads // max(1, numbers))
    return tuple(slice(head, head + step) for head in range(0, heads, step))


def quantize(
    q: torch.Tensor, k: torch.Tensor, scale: float | None, smooth_k: bool, want_shift: bool = True
) -> tuple[Quantized, Quantized]:
    """Q [B, H, Nq, D] and K [B, Hkv, Nk, D] in 8 bits; neither is written to."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    mean = k.mean(2, keepdim=True, dtype=torch.float32) if smooth_k else None
    shift = None
    if mean is not None and want_shift:
        wide = mean.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
        parts = [(q[:, part].float() @ wide[:, part])[..., 0] for part in _heads_at_a_time(q.shape[1], q.numel())]
        shift = torch.cat(parts, 1) * factor
    values, scales = per_block(q, BLOCK_QUERIES)
    scales = scales * (factor * math.log2(math.e))
    return Quantized(values, scales, shift), Quantized(*per_block(k, BLOCK_KEYS, mean))


def int8_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What the 8-bit kernel computes, on any device, in float32 (no gain in speed: it is there to be compared with).

    Args:
        q: [B, H, Nq, D].
        k, v: [B, Hkv, Nk, D] with H a multiple of Hkv.
        scale: of the scores; 1/sqrt(D) by default.
        smooth_k: take K's mean over the keys out of it first.
        return_lse: also return the natural log-sum-exp of the scores (with the mean put back), float32 [B, H, Nq].

    Returns:
        [B, H, Nq, D] in the dtype of q.
    """
    q8, k8 = quantize(q, k, scale, smooth_k, want_shift=return_lse)
    group = q.shape[1] // k.shape[1]
    keys = k8.values.float() * k8.scales.repeat_interleave(BLOCK_KEYS, 2)[:, :, : k.shape[2], None]
    keys, values = keys.repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for block in range(q8.scales.shape[2]):  # a block of queries at a time: scores of all at once may not fit
        part = slice(block * BLOCK_QUERIES, (block + 1) * BLOCK_QUERIES)
        # Scales of K are inside already; products with int8 queries are rounded to float32 once per sum.
        scores = q8.values[:, :, part].float() @ keys.transpose(2, 3)
        scores = scores * (q8.scales[:, :, block, None, None] * math.log(2))
        lse[:, :, part] = torch.logsumexp(scores, -1)
        out[:, :, part] = (torch.softmax(scores, -1) @ values).to(q.dtype)
    if not return_lse:
        return out
    return out, lse if q8.shift is None else lse + q8.shift
