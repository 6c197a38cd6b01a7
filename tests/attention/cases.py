"""Inputs, plans and the independent truth for tests of attention kernels."""

from __future__ import annotations

import math

import torch

from diffaccel.attention.plan import BlockPlan, Blocks, HeadPlans


def tensors(
    shape: tuple[int, ...] = (1, 2, 200, 64),
    dtype: torch.dtype = torch.float32,
    keys: int | None = None,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [B, H, N, D] of normal numbers; `keys` where their number differs."""
    generator = torch.Generator().manual_seed(seed)
    other = (*shape[:2], keys or shape[2], shape[3])
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in (shape, other, other))  # type: ignore[return-value]


def with_outliers(k: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """K with a bias per channel (sigma 5) and four channels at +30, as video models have them."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(k.shape[-1], generator=generator) * 5
    bias[torch.randperm(k.shape[-1], generator=generator)[:4]] = 30
    return k + bias.to(k.dtype)


def truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in float64 under a boolean mask, and its log-sum-exp; rows without a key give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return weights @ v, lse


def relative_l1(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Sum of absolute errors over sum of absolute values. (Cosine similarity does not see a wrong scale.)"""
    return float((found.double() - wanted).abs().sum() / wanted.abs().sum())


def ragged_plans(tokens: int = 200) -> HeadPlans:
    """Two plans for two heads: permuted clusters of uneven length (one empty, one with no keys), and even blocks."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.tensor([0, 30, 30, 100, 164, tokens], dtype=torch.int32)
    queries = Blocks(starts, torch.randperm(tokens, generator=generator))
    keys = Blocks(starts, torch.randperm(tokens, generator=generator))
    kept = torch.rand(5, 5, generator=generator) < 0.5
    kept[3] = False
    even = Blocks.even(tokens, 64)
    other = torch.rand(even.count, even.count, generator=generator) < 0.6
    other.fill_diagonal_(True)
    plans = BlockPlan.of_mask(kept, queries, keys), BlockPlan.of_mask(other, even, even)
    return HeadPlans(plans, torch.tensor([[0, 1]]))


def full_plan(tokens: int, block: int = 64) -> HeadPlans:
    """Every block kept."""
    even = Blocks.even(tokens, block)
    return HeadPlans((BlockPlan.of_mask(torch.ones(even.count, even.count, dtype=torch.bool), even, even),))


def token_masks(plans: HeadPlans, batch: int, heads: int) -> torch.Tensor:
    """[B, H, N, N] what the plans keep, from `BlockPlan.token_mask`."""
    masks = torch.stack([plan.token_mask() for plan in plans.plans])
    return masks[torch.zeros(batch, heads, dtype=torch.long) if plans.assign is None else plans.assign]
