"""Several measures of closeness at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import unknown
from . import colour as _colour
from . import metrics as _metrics
from . import motion as _motion
from . import perceptual as _perceptual
from . import structure as _structure

METRICS: dict[str, Callable[[Any, Any], float]] = {
    "colour_shift": _colour.colour_shift,
    "flicker_rise": _motion.flicker_rise,
    "lpips": _perceptual.lpips,
    "max_error": _metrics.max_error,
    "motion_psnr": _motion.motion_psnr,
    "ms_ssim": _structure.ms_ssim,
    "mse": _metrics.mse,
    "psnr": _metrics.psnr,
    "ssim": _metrics.ssim,
}
OF_VIDEOS = ("motion_psnr", "flicker_rise")  # frames may not be taken apart for these


def compare(reference: Any, candidate: Any, metrics: Iterable[str] = ("psnr", "ssim")) -> dict[str, float]:
    """Measure `candidate` against `reference`: {metric: mean over the pictures}, in the order asked for.

    reference, candidate: pictures or videos in any form that `quality.metrics` accepts (tensors, arrays, PIL
    images, paths of files), of one shape.
    metrics: any of psnr (dB), ssim, ms_ssim, mse, max_error, colour_shift (CIE L*a*b*), lpips (needs packages and
    weights of its own); of videos also motion_psnr (dB) and flicker_rise; one name alone will do.
    The psnr of identical pictures is inf, which JSON cannot say: see `jsonable`.
    Raises `InvalidOptionError` for an unknown metric (with the nearest name), what is not a picture, or two
    sides of different shapes, and `MissingDependencyError` where lpips or a video lacks what it needs.
    """
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    for name in names:
        if name not in METRICS:
            raise unknown("metric", str(name), METRICS)
    if "lpips" in names:
        _perceptual.require()  # before anything is read or computed
    reference, candidate = _metrics.as_batch(reference), _metrics.as_batch(candidate)
    ours, theirs = _metrics.pair(reference, candidate)  # converted once for all metrics
    return {
        name: METRICS[name](reference, candidate) if name in OF_VIDEOS else METRICS[name](ours, theirs)
        for name in names
    }


def jsonable(scores: Mapping[str, float]) -> dict[str, float | None]:
    """The same scores with None for what JSON has no number for (the psnr of identical pictures)."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}
