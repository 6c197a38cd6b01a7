"""While a plan is made for a pipeline whose weights are not loaded, modules on meta are judged by their shapes.

Nothing is attached to such a pipeline; outside of `planning()` weights on meta are refused as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_PLANNING: ContextVar[bool] = ContextVar("planning without weights", default=False)


def judged_by_shape() -> bool:
    """Is a plan being made that needs no weights?"""
    return _PLANNING.get()


@contextmanager
def planning() -> Iterator[None]:
    """Weights on meta count as weights inside."""
    token = _PLANNING.set(True)
    try:
        yield
    finally:
        _PLANNING.reset(token)


def execution_device(pipe: object) -> torch.device:
    """Where a pipeline computes; one without weights is taken to stand on the host, as one just loaded does."""
    found = torch.device(getattr(pipe, "_execution_device", None) or "cpu")
    return torch.device("cpu") if found.type == "meta" else found
