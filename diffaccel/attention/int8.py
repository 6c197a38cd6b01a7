"""Attention with 8-bit scores: the quantization of Q and K, and the whole computation in plain PyTorch.

Source: SageAttention, arXiv 2410.02367, section 4: subtract from K its mean over the keys (softmax does not see a
shift of a whole row of scores, and the mean is where K's outliers sit), then symmetric INT8 per block of queries and
keys; softmax and P·V stay in floating point. Unlike the paper, P·V is summed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK_QUERIES, BLOCK_KEYS = 128, 64  # as the paper's kernel


@dataclass(frozen=True)
class Quantized:
    """One side of the scores in 8 bits.

    Attributes:
        values: [B, H, N, D] int8, contiguous.
        scales: [B, H, blocks] float32; values * scale is what was there (for Q: times softmax scale and log2 e).
        shift: of Q only: [B, H, N] float32, what smoothing K took from each row's scores (times the softmax scale);
            None where K was not smoothed.
    """

    values: torch.Tensor
    scales: torch.Tensor
    shift: torch.Tensor | None = None


def per_block(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT8 per `block` tokens of x [B, H, N, D]: (int8 [B, H, N, D], float32 scales [B, H, blocks]).

    A block of zeros has scale 1 and stays zeros. Numbers that are not finite make the scale so, and the scores NaN.
    """
    x = x.float()
    tokens = x.shape[2]
    blocks = -(-tokens // block)
    padded = torch.nn.functional.pad(x, (0, 0, 0, blocks * block - tokens)).unflatten(2, (blocks, block))
    scales = padded.abs().amax((3, 4)) / 127
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = (padded / scales[..., None, None]).round_().clamp_(-127, 127).nan_to_num_(0)
    return values.to(torch.int8).flatten(2, 3)[:, :, :tokens].contiguous(), scales


def quantize(q: torch.Tensor, k: torch.Tensor, scale: float | None, smooth_k: bool) -> tuple[Quantized, Quantized]:
    """Q [B, H, Nq, D] and K [B, Hkv, Nk, D] in 8 bits; neither is written to."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    shift = None
    if smooth_k:
        mean = k.float().mean(2, keepdim=True)
        k = k.float() - mean
        group = q.shape[1] // k.shape[1]
        shift = (q.float() @ mean.repeat_interleave(group, 1).transpose(2, 3))[..., 0] * factor
    values, scales = per_block(q, BLOCK_QUERIES)
    k_values, k_scales = per_block(k, BLOCK_KEYS)
    return Quantized(values, scales * (factor * math.log2(math.e)), shift), Quantized(k_values, k_scales)


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
    q8, k8 = quantize(q, k, scale, smooth_k)
    group = q.shape[1] // k.shape[1]
    keys = k8.values.float() * k8.scales.repeat_interleave(BLOCK_KEYS, 2)[:, :, : k.shape[2], None]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, v.float()))
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
