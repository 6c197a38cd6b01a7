"""Gates: how much did a probe change? Pure functions over tensors."""

from __future__ import annotations

import torch


def relative_l1(current: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """mean|current - previous| / mean|previous|, a scalar tensor; inputs of one shape, e.g. [B, T, C].

    The mean runs over the whole batch. Source: TeaCache (arXiv 2411.19108), eq. 4; used on the residual of the
    first block by First-Block Cache (ParaAttention).
    """
    exact = torch.promote_types(current.dtype, torch.float32)  # a half-precision mean would round the decision
    return (current - previous).abs().mean(dtype=exact) / previous.abs().mean(dtype=exact)
