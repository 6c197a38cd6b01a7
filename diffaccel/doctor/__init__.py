"""What is wrong: with this machine's packages, with a pipeline, with a lever on it. `check(pipe)` says it in names.

Names are loaded on first use, so importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkup import check as check
    from .diagnosis import Diagnosis as Diagnosis
    from .diagnosis import Finding as Finding
    from .faults import FAULTS as FAULTS
    from .installation import environment as environment

_HOMES = {
    "FAULTS": "faults",
    "Diagnosis": "diagnosis",
    "Finding": "diagnosis",
    "check": "checkup",
    "environment": "installation",
}
__all__ = ["FAULTS", "Diagnosis", "Finding", "check", "environment"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
