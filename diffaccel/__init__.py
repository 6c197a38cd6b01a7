"""diffaccel: drop-in accelerators for diffusers pipelines.

    from diffaccel import accelerate, restore

The public names are loaded on first use, so that importing diffaccel imports neither torch nor diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    BudgetError,
    DiffaccelError,
    IncompatibleError,
    InvalidOptionError,
    InvalidPipelineError,
    MissingDependencyError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from .api import accelerate, attach, plan, presets, restore
    from .planner.options import Budget
    from .planner.plan import Plan
    from .quantization.loader import load_quantized

__version__ = "0.1.0"

_LAZY = {
    "Budget": "diffaccel.planner.options",
    "Plan": "diffaccel.planner.plan",
    "accelerate": "diffaccel.api",
    "attach": "diffaccel.api",
    "load_quantized": "diffaccel.quantization.loader",
    "plan": "diffaccel.api",
    "presets": "diffaccel.api",
    "restore": "diffaccel.api",
}

__all__ = [
    "Budget",
    "BudgetError",
    "DiffaccelError",
    "IncompatibleError",
    "InvalidOptionError",
    "InvalidPipelineError",
    "MissingDependencyError",
    "Plan",
    "UnsupportedModelError",
    "accelerate",
    "attach",
    "load_quantized",
    "plan",
    "presets",
    "restore",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    if name in ("ledger", "quality", "testbed", "tune"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
