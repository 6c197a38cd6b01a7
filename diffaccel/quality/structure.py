"""Multi-scale structural similarity (MS-SSIM, Wang et al. 2003), on pictures of any size from 11 pixels a side."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidOptionError
from .metrics import pair

WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # of the scales, finest first; from the paper
_WINDOW = 11


def ms_ssim(reference: Any, candidate: Any) -> float:
    """MS-SSIM averaged over pictures; 1 if identical. Small pictures have fewer of the five scales (`scales`), whose
    weights then add up to 1; with one scale it is the SSIM of it."""
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure

    ours, theirs = pair(reference, candidate)
    count = scales(min(ours.shape[-2:]))
    if not count:
        raise InvalidOptionError(
            f"ms_ssim needs pictures of at least {_WINDOW}x{_WINDOW} pixels, got {ours.shape[-1]}x{ours.shape[-2]}; "
            "leave it out of metrics"
        )
    whole = sum(WEIGHTS[:count])
    betas = tuple(weight / whole for weight in WEIGHTS[:count])
    # "relu": a negative similarity at a coarse scale has no power; it counts as none.
    value = multiscale_structural_similarity_index_measure(theirs, ours, data_range=1.0, betas=betas, normalize="relu")
    return float(value)


def scales(side: int) -> int:
    """How many scales a picture of this shorter side has: after torchmetrics."""
    counts = range(1, len(WEIGHTS) + 1)
    fit = [n for n in counts if side >> (n - 1) > _WINDOW // 2 and side // max(1, (n - 1) ** 2) >= _WINDOW]
    return max(fit, default=0)
