"""Marks in time: CUDA events where the work runs on a GPU (no host sync per mark), the host clock elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

Mark = float | torch.cuda.Event  # a point in time: seconds on the host clock, or a recorded CUDA event


class Stopwatch:
    """`mark()` now, `seconds(a, b)` later; on a GPU the difference is read once the run has ended."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device
        self.mark: Callable[[], Mark] = self._event if self.cuda else time.perf_counter
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def finish(self) -> None:
        """Wait until every mark can be read."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, start: Mark | None, end: Mark | None) -> float:
        """Seconds between two marks (after `finish`)."""
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        if start is None or end is None or isinstance(start, float) or isinstance(end, float):
            return 0.0
        return float(start.elapsed_time(end)) / 1e3

    def peak_memory_bytes(self) -> int:
        """Peak bytes allocated on the GPU in this run; on a CPU the peak resident set of the process so far."""
        if self.cuda:
            return int(torch.cuda.max_memory_allocated(self.device))
        if sys.platform == "win32":
            return 0
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak if sys.platform == "darwin" else peak * 1024)
