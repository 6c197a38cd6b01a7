"""Tune step schedules for one pipeline: `search(pipe, prompts, budgets)`; docs/tuning.md.

Names are loaded on first use, so importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .job import search as search
    from .outcome import Tuned as Tuned

_HOMES = {"Tuned": "outcome", "search": "job"}
__all__ = ["Tuned", "search"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
