"""What this processor does, measured for a few seconds: products of matrices and copies, counted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ..errors import InvalidOptionError
from .hardware import GIB, HARDWARE, Hardware

SECONDS = 5.0
_SIZE = 1024  # of the square matrices
_BYTES = 64 * 2**20  # of a copied tensor: larger than the caches of most processors
_SHARES = {"float32": 0.4, "bfloat16": 0.4, "copy": 0.2}  # of the time


class Work(Protocol):
    """What is done over and over."""

    def multiply(self, dtype: str) -> int:
        """One product of square matrices; its FLOPs."""

    def copy(self) -> int:
        """One copy; the bytes read and written."""


class _Torch:
    """The work on torch's threads."""

    def __init__(self) -> None:
        import torch

        self._factors = {
            name: torch.ones(_SIZE, _SIZE, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")
        }
        self._results = {name: torch.empty_like(factor) for name, factor in self._factors.items()}
        self._from, self._to = (torch.ones(_BYTES, dtype=torch.uint8) for _ in range(2))
        self._mm = torch.mm

    def multiply(self, dtype: str) -> int:
        factor = self._factors[dtype]
        self._mm(factor, factor, out=self._results[dtype])
        return int(2 * _SIZE**3)

    def copy(self) -> int:
        self._to.copy_(self._from)
        return 2 * _BYTES


def probe(
    seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter, work: Work | None = None
) -> Hardware:
    """This processor as `Hardware`: what it was seen to do, not what its maker says.

    Args:
        seconds: all the time it may take; each of the three kinds of work is done at least once, after a first time
            that does not count.
        clock: seconds of any origin; work: what is done (torch, on its threads).

    Returns:
        `bf16_tflops` is the faster of bfloat16 and float32 (processors without units for the first run models in the
        second), `bandwidth_gb_s` that of a copy, `memory_gib` the host's.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= 3600:
        raise InvalidOptionError(f"seconds must be above 0 and at most 3600, got {seconds!r}")
    doing = _Torch() if work is None else work
    tflops = max(
        _rate(lambda name=name: doing.multiply(name), seconds * _SHARES[name], clock)  # type: ignore[misc]
        for name in ("float32", "bfloat16")
    )
    bandwidth = _rate(doing.copy, seconds * _SHARES["copy"], clock)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return replace(
        HARDWARE["cpu"], memory_gib=round(memory, 1), bf16_tflops=tflops / 1e12, bandwidth_gb_s=bandwidth / 1e9
    )


def _rate(step: Callable[[], int], seconds: float, clock: Callable[[], float]) -> float:
    """What `step` counts, per second; the first time is not counted."""
    step()
    start, done = clock(), 0
    while True:
        done += step()
        passed = clock() - start
        if passed >= seconds and passed > 0:
            return done / passed
