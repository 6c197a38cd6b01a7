"""What brings stored weights into a buffer while the device computes: a worker thread, a side stream, or both.

`start` begins to fill a buffer and returns a ticket; `ticket()` waits until the buffer may be used. On a CPU a thread
reads (a read lets other threads compute); on CUDA a side stream copies from page-locked host memory, behind the
thread where the weights lie on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from ..core.compat import host_edit
from .store import StoredTensors

Ticket = Callable[[], None]
Load = Sequence[tuple[StoredTensors, int]]  # what to bring, and the byte of the buffer at which it goes


class Buffer:
    """Room for the weights of one block on the compute device."""

    @host_edit
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.ready: Ticket | None = None
        self.left: Any = None  # CUDA event: the last kernel that used it was queued
        self.nbytes = nbytes
        self.versions: list[int] | None = None  # of the stored tensors when the load began
        self.views: dict[tuple[int, int], list[torch.Tensor]] = {}  # per block and generation: its tensors in here


class TransferStream(Protocol):
    """A way into buffers. `read_s` counts the seconds in which files were read."""

    read_s: float

    def start(self, load: Load, buffer: Buffer) -> Ticket:
        """Begin to fill the buffer."""

    def leave(self, buffer: Buffer) -> None:
        """What was queued so far is the last use of the buffer's content."""

    def close(self) -> None:
        """Wait for what is under way, and stop."""


class ThreadTransfer:
    """Reads into host memory, one load after another, in a thread that lives as long as a run."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="diffaccel-offload")
        self.read_s = 0.0

    def _read(self, load: Load, memory: memoryview) -> None:
        started = time.perf_counter()
        read(load, memory)
        self.read_s += time.perf_counter() - started

    def start(self, load: Load, buffer: Buffer) -> Ticket:
        """Queue the reads."""
        memory = buffer.data.numpy().data
        done: Future[None] = self.pool.submit(self._read, load, memory)

        def ready() -> None:
            if not done.cancelled():
                done.result()

        return ready

    def leave(self, buffer: Buffer) -> None:
        """A CPU is through with the block when its forward returns."""

    def close(self) -> None:
        """Drop what has not begun, wait for the rest."""
        self.pool.shutdown(wait=True, cancel_futures=True)


def read(load: Load, memory: memoryview) -> None:
    """Bring every stored to its place."""
    for stored, at in load:
        stored.read(memory[at : at + stored.nbytes])


class CudaTransfer:
    """Copies to a CUDA device on a side stream; from disk by way of two page-locked stagings that a thread fills.

    Not run on a GPU by us.
    """

    def __init__(self, device: torch.device, from_disk: bool) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="diffaccel-offload") if from_disk else None
        self.stagings: list[tuple[torch.Tensor, Any] | None] = [None, None]
        self.turn = 0
        self.read_s = 0.0

    def start(self, load: Load, buffer: Buffer) -> Ticket:
        """Queue the copies behind the buffer's last use."""
        if self.pool is None:
            event = self._copy(load, buffer, None)
            return lambda: torch.cuda.current_stream(self.device).wait_event(event)
        done = self.pool.submit(self._by_way_of_host, load, buffer)

        def ready() -> None:
            if not done.cancelled():
                torch.cuda.current_stream(self.device).wait_event(done.result())

        return ready

    def _by_way_of_host(self, load: Load, buffer: Buffer) -> Any:
        nbytes = buffer.data.numel()
        found = self.stagings[self.turn]
        if found is not None:
            found[1].synchronize()  # the copy out of it
        if found is None or found[0].numel() < nbytes:
            with torch.inference_mode(False):
                found = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), None)
        started = time.perf_counter()
        read(load, found[0].numpy().data)
        self.read_s += time.perf_counter() - started
        event = self._copy(load, buffer, found[0])
        self.stagings[self.turn] = (found[0], event)
        self.turn = 1 - self.turn
        return event

    def _copy(self, load: Load, buffer: Buffer, staging: torch.Tensor | None) -> Any:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if buffer.left is not None:
                self.stream.wait_event(buffer.left)
            for stored, at in load:
                source = stored.flat if staging is None else staging[at : at + stored.nbytes]
                buffer.data[at : at + stored.nbytes].copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return event

    def leave(self, buffer: Buffer) -> None:
        """The next copy into the buffer waits for the kernels queued so far."""
        buffer.left = torch.cuda.Event()
        buffer.left.record(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Wait for what is under way."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
        self.stream.synchronize()
        self.stagings = [None, None]
