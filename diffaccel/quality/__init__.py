"""How close two sets of pictures are: `compare` for several measures at once, `judge` for each prompt with intervals,
or each measure by itself.

Names are loaded on first use, so importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..bench import bench as bench
    from ..bench import sweep as sweep
    from .bootstrap import Interval as Interval
    from .broken import faults as faults
    from .colour import colour_shift as colour_shift
    from .comparison import compare as compare
    from .comparison import jsonable as jsonable
    from .differences import difference as difference
    from .judgement import Judgement as Judgement
    from .judgement import judge as judge
    from .metrics import max_error as max_error
    from .metrics import mse as mse
    from .metrics import psnr as psnr
    from .metrics import ssim as ssim
    from .motion import flicker as flicker
    from .motion import flicker_rise as flicker_rise
    from .motion import motion_psnr as motion_psnr
    from .perceptual import lpips as lpips
    from .structure import ms_ssim as ms_ssim

_HOMES = {
    "Interval": "bootstrap",
    "Judgement": "judgement",
    "colour_shift": "colour",
    "compare": "comparison",
    "difference": "differences",
    "faults": "broken",
    "flicker": "motion",
    "flicker_rise": "motion",
    "judge": "judgement",
    "jsonable": "comparison",
    "lpips": "perceptual",
    "max_error": "metrics",
    "motion_psnr": "motion",
    "ms_ssim": "structure",
    "mse": "metrics",
    "psnr": "metrics",
    "ssim": "metrics",
}
_ABOVE = (
    "bench",
    "sweep",
)  # of the room `bench`, which stands far above this one: handed on to whoever looks for it here
__all__ = [
    "Interval",
    "Judgement",
    "bench",
    "colour_shift",
    "compare",
    "difference",
    "faults",
    "flicker",
    "flicker_rise",
    "jsonable",
    "judge",
    "lpips",
    "max_error",
    "motion_psnr",
    "ms_ssim",
    "mse",
    "psnr",
    "ssim",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in _ABOVE:
        return getattr(importlib.import_module(f"{__package__.rpartition('.')[0]}.bench"), name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
