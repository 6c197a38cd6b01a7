"""Which blocks have their weights on the device, and which are fetched next.

Some blocks stay for good. The others share `prefetch + 1` buffers: one for the block that computes, the rest for those
that follow it in the order in which the last whole call ran them. Nothing is fetched for a block that a cache stands
in for, nor before the cache has decided.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...core.chain import stood_in_for
from ...core.listener import Listener, next_computes
from ...core.run import Call
from ..transfer import Buffer, TransferStream
from .block import Block


@dataclass
class TransferCounts:
    """What was moved so far, and the most that was resident at once (since the last `open` of a first run)."""

    blocks_moved: int = 0
    bytes_moved: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    live_blocks_peak: int = 0
    live_bytes_peak: int = 0


class Prefetcher:
    """Loads blocks and evicts them.

    Args:
        blocks: those that move.
        kept: (blocks, bytes) that stay on the device for good, weights that several blocks share among them.
        prefetch: blocks fetched ahead of the one that computes.
        device: where they compute.
        open_stream: makes the stream of a run.
        renew: called with a block whose tensors no longer look at the store; stores them anew.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        kept: tuple[int, int],
        prefetch: int,
        device: torch.device,
        open_stream: Callable[[], TransferStream],
        renew: Callable[[Block], None],
    ) -> None:
        self.blocks = {block.index: block for block in blocks}
        self.prefetch, self.device, self.open_stream, self.renew = prefetch, device, open_stream, renew
        self.kept_blocks, self.kept_bytes = kept
        self.stream: TransferStream | None = None  # open while a run is
        self.runs = 0
        self.buffers: list[Buffer] = []  # of the open run
        self.free: list[Buffer] = []
        self.held: dict[int, Buffer] = {}  # block -> buffer it is in, or on its way into
        self.busy: dict[int, Buffer] = {}  # blocks that compute now
        self.order: dict[str, list[int]] = {}  # per denoiser: every block hooked, as the last whole call ran them
        self.ran: list[int] = []  # of the call in progress
        self.call: Call | None = None
        self.listeners: Sequence[Listener] = ()
        self.wrap: bool | None = None  # is the next call sure to run its blocks?
        self.counts = TransferCounts()
        self.lock = threading.RLock()

    # ---- a run ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """A run begins."""
        with self.lock:
            if not self.runs:
                self.stream = self.open_stream()
                self.counts.live_blocks_peak, self.counts.live_bytes_peak = self.kept_blocks, self.kept_bytes
            self.runs += 1

    def close(self) -> None:
        """A run ended, however: with the outermost one everything is evicted and the buffers go."""
        with self.lock:
            self.runs = max(0, self.runs - 1)
            if not self.runs:
                self.settle()

    def settle(self) -> None:
        """Stop what is under way, and evict every block."""
        with self.lock:
            stream, self.stream = self.stream, None
            if stream is not None:
                stream.close()
                self.counts.read_s += stream.read_s
            for index in self.busy:
                self.blocks[index].evict()
            self.held.clear()
            self.busy.clear()
            self.buffers, self.free, self.call, self.listeners = [], [], None, ()

    # ---- a denoiser call -----------------------------------------------------------------------------------

    def begin(self, call: Call, listeners: Sequence[Listener]) -> None:
        """A denoiser is about to run."""
        self.call, self.listeners, self.ran, self.wrap = call, listeners, [], None

    def end(self, call: Call) -> None:
        """It returned or raised. A whole pass is the order to expect; what follows is fetched if it is sure to run."""
        if len(self.ran) >= len(self.order.get(call.component, ())):
            self.order[call.component] = self.ran
        with self.lock:
            self._ahead(call.component, -1)
        self.call = None

    # ---- a block -------------------------------------------------------------------------------------------

    def kept_runs(self, index: int, component: str) -> None:
        """A block that stays is about to run: time to fetch others."""
        with self.lock:
            self.ran.append(index)
            self._ahead(component, index)

    def enter(self, block: Block) -> None:
        """The block is about to run: its weights are on the device when this returns."""
        with self.lock:
            index = block.index
            self.ran.append(index)
            started = time.perf_counter()
            versions = block.versions()
            if versions is None:  # somebody gave it other tensors within the run
                self.renew(block)
                self._forget()
                versions = block.versions()
            buffer = self.held.get(index)
            if buffer is not None and buffer.versions != versions:
                self._release(self._drop(index))  # written to since it was fetched
                buffer = None
            if buffer is None:
                buffer = self._fetch(block, versions)
            assert buffer.ready is not None
            self.busy[index] = buffer
            buffer.ready()
            self.counts.wait_s += time.perf_counter() - started
            block.bind(buffer)
            self._ahead(block.component, index)

    def leave(self, block: Block) -> None:
        """The block ran, or raised."""
        with self.lock:
            buffer = self.busy.get(block.index)
            if buffer is None:
                return  # it was never loaded
            block.evict(buffer.versions)
            del self.busy[block.index]
            self.held.pop(block.index, None)
            if self.stream is not None:
                if self.device.type != "cpu":  # a CPU is through with the block when its forward returns
                    self.stream.leave(buffer)
                if buffer in self.buffers:  # others were for one use
                    self.free.append(buffer)
            self._ahead(block.component, block.index)

    # ---- buffers -------------------------------------------------------------------------------------------

    def _fetch(self, block: Block, versions: list[int] | None) -> Buffer:
        """Begin to load a block that is needed now."""
        stream = self.stream or self.open_stream()
        if self.stream is None or torch.is_grad_enabled():  # a graph may keep the weights: no buffer others will fill
            buffer = self._new(stream, block.nbytes)
        else:
            buffer = self._room() or self._steal() or self._new(stream, self.capacity)
        self._start(stream, block, buffer, versions)
        if self.stream is None and buffer.ready is not None:
            buffer.ready()
            stream.close()
        return buffer

    def _new(self, stream: TransferStream, nbytes: int) -> Buffer:
        buffer = Buffer(nbytes, self.device)
        stream.leave(buffer)  # the allocator may have handed out memory that queued kernels still use
        return buffer

    @property
    def capacity(self) -> int:
        """Bytes of a buffer that takes any block."""
        return max((block.nbytes for block in self.blocks.values()), default=0)

    def _room(self) -> Buffer | None:
        if self.free:
            return self.free.pop()
        if len(self.buffers) <= self.prefetch:
            assert self.stream is not None
            buffer = self._new(self.stream, self.capacity)
            self.buffers.append(buffer)
            return buffer
        return None

    def _steal(self, but: Sequence[Block] = ()) -> Buffer | None:
        """The buffer of a block that was fetched and is not needed soon: the last one fetched."""
        for index in reversed(self.held):
            if index not in self.busy and self.blocks[index] not in but and self.held[index] in self.buffers:
                return self._drop(index)
        return None

    def _release(self, buffer: Buffer) -> None:
        if buffer in self.buffers:  # others were for one use
            self.free.append(buffer)

    def _forget(self) -> None:
        """Begin with new buffers: a block has become larger, perhaps."""
        for index in [i for i in self.held if i not in self.busy]:
            self._drop(index)
        self.buffers, self.free = [], []

    def _drop(self, index: int) -> Buffer:
        buffer = self.held.pop(index)
        assert buffer.ready is not None
        buffer.ready()
        return buffer

    def _start(self, stream: TransferStream, block: Block, buffer: Buffer, versions: list[int] | None) -> None:
        buffer.versions = versions
        buffer.ready = stream.start(block.offsets, buffer)
        self.held[block.index] = buffer
        counts = self.counts
        counts.blocks_moved += 1
        counts.bytes_moved += block.nbytes
        counts.live_blocks_peak = max(counts.live_blocks_peak, self.kept_blocks + len(self.held))
        live = self.kept_bytes
        for one in {*self.buffers, *self.held.values()}:
            live += one.nbytes
        counts.live_bytes_peak = max(counts.live_bytes_peak, live)

    def _ahead(self, component: str, index: int) -> None:
        """Fetch what comes after block `index` (-1: at the end of a call) into the buffers that are free."""
        call = self.call
        if not self.prefetch or self.stream is None or call is None or torch.is_grad_enabled():
            return
        order = self.order.get(component)
        if not order:
            return
        for listener in self.listeners:
            if listener.deciding:
                return  # a cache has still to decide, inside this call, whether the blocks to come are run
        wanted = self._wanted(call, order, index)
        for block in wanted:
            if block.index in self.held:
                continue
            versions = block.versions()
            if versions is None:
                continue  # given other tensors: `enter` stores them first
            buffer = (self.free.pop() if self.free else self._room()) or self._steal(wanted)
            if buffer is None:
                return
            self._start(self.stream, block, buffer, versions)

    def _wanted(self, call: Call, order: list[int], index: int) -> list[Block]:
        """The next blocks that are sure to run, as many as buffers can take."""
        at = order.index(index) if index in order else len(order) - 1
        room = self.prefetch + 1 - len(self.busy)
        found: list[Block] = []
        for after in order[at + 1 :]:
            if len(found) == room:
                return found
            block = self.blocks.get(after)
            if block is not None and block.link is not None and not stood_in_for(block.link):
                found.append(block)
        if len(found) < room:
            if self.wrap is None:
                self.wrap = next_computes(call, self.listeners)
            for after in order[: at + 1] if self.wrap else ():
                if len(found) < room and after in self.blocks and after not in self.busy:
                    found.append(self.blocks[after])
        return found
