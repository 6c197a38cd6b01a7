"""Pictures of a difference: where two sets of pictures are apart, made bright enough to be seen."""

from __future__ import annotations

import math
from typing import Any

import torch

from .metrics import as_batch, pair

_MOST_GAIN = 4096.0


def difference(reference: Any, candidate: Any, gain: float | None = None) -> tuple[torch.Tensor, float]:
    """(gain x |reference - candidate| in 0..1, gain), in the candidate's shape; black where they are equal.

    gain: a power of two unless given, the largest at which no more than 1 in 100 values of the set is cut off at 1.
    One gain for the whole set, so that its pictures can be compared with each other.
    """
    shape = as_batch(candidate).shape
    ours, theirs = pair(reference, candidate)
    apart = (ours - theirs).abs().nan_to_num(nan=1.0).reshape(shape)
    factor = _gain(apart) if gain is None else gain
    return (apart * factor).clamp(max=1.0), factor


def _gain(apart: torch.Tensor) -> float:
    values = apart.flatten()
    high = float(values.kthvalue(max(1, math.ceil(0.99 * values.numel()))).values) or float(values.max())
    return min(2.0 ** math.floor(math.log2(1 / high)), _MOST_GAIN) if high > 0 else 1.0
