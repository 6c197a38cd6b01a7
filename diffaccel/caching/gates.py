"""Gates: how much did a probe change? Pure functions over tensors."""

from __future__ import annotations

import torch


def relative_l1(current: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """mean|current - previous| / mean|previous|, a scalar tensor; inputs of one shape, e.g. [B, T, C].

    The mean runs over the whole batch. Source: TeaCache (arXiv 2411.19108), eq. 4; used on the residual of the
    first block by First-Block Cache (ParaAttention).
    """
    return (current - previous).abs().mean() / previous.abs().mean()
