"""The conveyor: which blocks have their weights on the device, and which come next.

Some blocks stay for good. The others take turns in `prefetch + 1` buffers: one for the block that computes, the rest
for those that follow it in the order in which the last whole call ran them. Nothing is fetched for a block that a
cache stands in for, nor before the cache has decided.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.chain import Link, stood_in_for
from ...core.compat import host_edit
from ...core.run import Call
from ..store import StoredTensors
from ..transfer import Buffer, TransferStream
from .foresight import undecided, will_compute


@dataclass(eq=False)
class Block:
    """One block that takes turns: its stored parcels, and its hook."""

    index: int
    label: str
    component: str
    module: torch.nn.Module
    boxes: list[StoredTensors] = field(default_factory=list)
    link: Link | None = None
    generation: int = 0  # counts the changes of `boxes`

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that holds it."""
        return sum(box.nbytes for box in self.boxes)

    def load(self) -> list[tuple[StoredTensors, int]]:
        """Its boxes and where each goes in a buffer."""
        at, found = 0, []
        for box in self.boxes:
            found.append((box, at))
            at += box.nbytes
        return found

    def versions(self) -> list[int]:
        """How often each of its tensors was written to in place."""
        return [slot.tensor._version for box in self.boxes for slot in box.slots]

    @host_edit
    def views(self, buffer: Buffer) -> list[torch.Tensor]:
        """Its tensors as they lie in the buffer."""
        return [slot.on(buffer.data, at + box.layout[slot.chunk][0]) for box, at in self.load() for slot in box.slots]

    def intact(self) -> bool:
        """Do all of its tensors point at the store, in the form they were stored in?"""
        return all(box.holds(i) for box in self.boxes for i in range(len(box.slots)))

    def bind(self, buffer: Buffer) -> None:
        """Point its tensors into the buffer."""
        key = self.index * 1_000_000 + self.generation
        views = buffer.views.get(key)
        if views is None:
            views = buffer.views[key] = self.views(buffer)
        at = 0
        for box in self.boxes:
            for slot in box.slots:
                slot.tensor.data = views[at]
                at += 1

    def park(self, versions: list[int] | None = None) -> None:
        """Point its tensors at the store; what was written to since `versions` (a buffer that counts) goes along."""
        if versions is not None:
            now = self.versions()
            if now != versions:
                self._write_back(versions)
        for box in self.boxes:
            box.park()

    def _write_back(self, versions: list[int]) -> None:
        at = 0
        with torch.no_grad():
            for box in self.boxes:
                for slot, parked in zip(box.slots, box.parked, strict=True):
                    if slot.tensor._version != versions[at] and slot.tensor.shape == parked.shape:
                        parked.copy_(slot.tensor.detach())
                    at += 1


@dataclass
class TransferCounts:
    """What was moved so far, and the most that lived at once (since the last `reset`)."""

    blocks_moved: int = 0
    bytes_moved: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    live_blocks_peak: int = 0
    live_bytes_peak: int = 0


class Prefetcher:
    """Brings blocks in and lets them go.

    Attributes:
        kept_blocks, kept_bytes: what stays on the device for good, and weights that several blocks share.
        prefetch: blocks fetched ahead of the one that computes.
    """

    def __init__(
        self,
        blocks: list[Block],
        kept: tuple[int, int],
        prefetch: int,
        device: torch.device,
        lane: Callable[[], TransferStream],
        renew: Callable[[Block], None],
    ) -> None:
        self.blocks = {block.index: block for block in blocks}
        self.prefetch, self.device, self.make_lane, self.renew = prefetch, device, lane, renew
        self.kept_blocks, self.kept_bytes = kept
        self.lane: TransferStream | None = None  # open while a run is
        self.runs = 0
        self.buffers: list[Buffer] = []  # of the open run
        self.free: list[Buffer] = []
        self.held: dict[int, Buffer] = {}  # block -> buffer it is in, or on its way into
        self.busy: dict[int, tuple[Buffer, list[int]]] = {}  # blocks that compute now
        self.order: dict[str, list[int]] = {}  # per denoiser: every block hooked, as the last whole call ran them
        self.ran: list[int] = []  # of the call in progress
        self.call: Call | None = None
        self.listeners: list[Any] = []
        self.wrap: bool | None = None  # is the next call sure to run its blocks?
        self.tally = TransferCounts()
        self.lock = threading.RLock()

    # ---- a run ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """A run begins."""
        with self.lock:
            if not self.runs:
                self.lane = self.make_lane()
                self.tally.live_blocks_peak, self.tally.live_bytes_peak = self.kept_blocks, self.kept_bytes
            self.runs += 1

    def close(self) -> None:
        """A run ended, however: with the outermost one everything is parked and the buffers are let go."""
        with self.lock:
            self.runs = max(0, self.runs - 1)
            if not self.runs:
                self.settle()

    def settle(self) -> None:
        """Stop what is under way, and park every block."""
        with self.lock:
            lane, self.lane = self.lane, None
            if lane is not None:
                lane.close()
                self.tally.read_s += lane.read_s
            for index in self.busy:
                self.blocks[index].park()
            self.held.clear()
            self.busy.clear()
            self.buffers, self.free, self.call = [], [], None

    # ---- a denoiser call -----------------------------------------------------------------------------------

    def begin(self, call: Call, listeners: list[Any]) -> None:
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
            self.ran.append(block.index)
            started = time.perf_counter()
            if not block.intact():  # somebody gave it other tensors within the run
                self.renew(block)
                self._forget()
            buffer = self.held.get(block.index)
            if buffer is not None and buffer.versions != block.versions():
                self._release(self._drop(block.index))  # written to since it was fetched
                buffer = None
            if buffer is None:
                buffer = self._fetch(block)
            assert buffer.ready is not None
            self.busy[block.index] = (buffer, buffer.versions)
            buffer.ready()
            self.tally.wait_s += time.perf_counter() - started
            block.bind(buffer)
            self._ahead(block.component, block.index)

    def leave(self, block: Block) -> None:
        """The block ran, or raised."""
        with self.lock:
            buffer, versions = self.busy.get(block.index, (None, None))
            if buffer is None:
                return  # it was never brought in
            block.park(versions)
            self.busy.pop(block.index)
            self.held.pop(block.index, None)
            if self.lane is not None:
                self.lane.leave(buffer)
                self._release(buffer)
            self._ahead(block.component, block.index)

    # ---- buffers -------------------------------------------------------------------------------------------

    def _fetch(self, block: Block) -> Buffer:
        """Begin to bring a block in that is needed now."""
        lane = self.lane or self.make_lane()
        if self.lane is None or torch.is_grad_enabled():  # a graph may keep the weights: no buffer others will fill
            buffer = self._new(lane, block.nbytes)
        else:
            buffer = self._room() or self._steal() or self._new(lane, self.capacity)
        self._start(lane, block, buffer)
        if self.lane is None and buffer.ready is not None:
            buffer.ready()
            lane.close()
        return buffer

    def _new(self, lane: TransferStream, nbytes: int) -> Buffer:
        buffer = Buffer(nbytes, self.device)
        lane.leave(buffer)  # the allocator may have handed out memory that queued kernels still use
        return buffer

    @property
    def capacity(self) -> int:
        """Bytes of a buffer that takes any block."""
        return max((block.nbytes for block in self.blocks.values()), default=0)

    def _room(self) -> Buffer | None:
        if self.free:
            return self.free.pop()
        if len(self.buffers) <= self.prefetch:
            assert self.lane is not None
            buffer = self._new(self.lane, self.capacity)
            self.buffers.append(buffer)
            return buffer
        return None

    def _steal(self, but: tuple[int, ...] = ()) -> Buffer | None:
        """The buffer of a block that was fetched and is not needed soon: the last one fetched."""
        for index in reversed(self.held):
            if index not in self.busy and index not in but and self.held[index] in self.buffers:
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

    def _start(self, lane: TransferStream, block: Block, buffer: Buffer) -> None:
        buffer.versions = block.versions()
        buffer.ready = lane.start(block.load(), buffer)
        self.held[block.index] = buffer
        tally = self.tally
        tally.blocks_moved += 1
        tally.bytes_moved += block.nbytes
        tally.live_blocks_peak = max(tally.live_blocks_peak, self.kept_blocks + len(self.held))
        nbytes = {id(b): b.data.numel() for b in (*self.buffers, *self.held.values())}
        tally.live_bytes_peak = max(tally.live_bytes_peak, self.kept_bytes + sum(nbytes.values()))

    def _ahead(self, component: str, index: int) -> None:
        """Fetch what comes after block `index` (-1: at the end of a call) into the buffers that are free."""
        call = self.call
        if not self.prefetch or self.lane is None or call is None or torch.is_grad_enabled():
            return
        if undecided(self.listeners):
            return
        wanted = self._wanted(component, index)
        for block in wanted:
            if block.index not in self.held:
                buffer = self._room() or self._steal(tuple(b.index for b in wanted))
                if buffer is None:
                    return
                self._start(self.lane, block, buffer)

    def _wanted(self, component: str, index: int) -> list[Block]:
        order = self.order.get(component, [])
        at = order.index(index) if index in order else len(order) - 1
        room = self.prefetch + 1 - len(self.busy)
        found: list[Block] = []
        for after in order[at + 1 :]:
            block = self.blocks.get(after)
            if block is not None and len(found) < room and block.link is not None and not stood_in_for(block.link):
                found.append(block)
        if len(found) < room and order and self._wraps():
            first = [self.blocks[i] for i in order[: at + 1] if i in self.blocks and i not in self.busy]
            found += first[: room - len(found)]
        return found

    def _wraps(self) -> bool:
        if self.wrap is None:
            assert self.call is not None
            self.wrap = will_compute(self.call, self.listeners)
        return self.wrap
