"""Speed and fidelity in one measurement: `bench` plans in turn, `sweep` one parameter, `determinism`; docs/bench.md.

Names are loaded on first use, so importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contest import bench as bench
    from .curve import Curve as Curve
    from .result import Result as Result
    from .same import Finding as Finding
    from .same import determinism as determinism
    from .sweeping import sweep as sweep

_HOMES = {
    "Curve": "curve",
    "Finding": "same",
    "Result": "result",
    "bench": "contest",
    "determinism": "same",
    "sweep": "sweeping",
}
__all__ = ["Curve", "Finding", "Result", "bench", "determinism", "sweep"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
