"""How close two sets of pictures are: `compare` for several measures at once, or each measure by itself.

Names are loaded on first use, so importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import compare as compare
    from .comparison import jsonable as jsonable
    from .metrics import max_error as max_error
    from .metrics import mse as mse
    from .metrics import psnr as psnr
    from .metrics import ssim as ssim
    from .perceptual import lpips as lpips

_HOMES = {
    "compare": "comparison",
    "jsonable": "comparison",
    "lpips": "perceptual",
    "max_error": "metrics",
    "mse": "metrics",
    "psnr": "metrics",
    "ssim": "metrics",
}
__all__ = ["compare", "jsonable", "lpips", "max_error", "mse", "psnr", "ssim"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
