"""Many seeds a few steps far, previews, and the chosen ones to their end: `scout(pipe, prompts, seeds, until_step)`.

Names are loaded on first use, so importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .seeds import Candidate as Candidate
    from .seeds import Scouting as Scouting
    from .seeds import scout as scout

__all__ = ["Candidate", "Scouting", "scout"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".seeds", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
