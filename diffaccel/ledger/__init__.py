"""What a generation costs: FLOPs, bytes and seconds of encode, denoise and decode, for any model, shape and machine.

    from diffaccel import ledger

    ledger.estimate("flux.1-dev", height=1024, width=1024).flops.total

Arithmetic on configs: nothing here imports torch until a live pipeline is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arithmetic import estimate
    from .book import Ledger
    from .live.counting import from_pipeline

_LAZY = {"Ledger": "book", "estimate": "arithmetic", "from_pipeline": "live.counting"}

__all__ = ["Ledger", "estimate", "from_pipeline"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
