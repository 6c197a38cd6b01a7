"""Who is in and who is away: units of weights that move between a store and the compute device.

Nothing here relies on what a module looked like before: each move looks at its tensors as they are now, so that
weights that were loaded, merged, cast or replaced since are taken as they are. A unit that computed with unchanged
weights goes away without a byte written, which a checksum of all of them tells.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.compat import host_edit
from ...errors import DiffaccelError
from ..packing import pack, tensors_of
from ..store import Store, StoredTensors
from .checksum import checksum, spread
from .peak import CHUNK_BYTES


@dataclass(eq=False)
class DeviceCopy:
    """The copy of one box that is in: a flat tensor per chunk, each with a storage of its own.

    `spans` are the stretches that checksums are taken of, with their places in the box.
    """

    box: StoredTensors
    chunks: list[torch.Tensor]
    spans: list[tuple[int, torch.Tensor]]
    checksums: list[tuple[int, int]] = field(default_factory=list)

    def holds(self, index: int) -> bool:
        """Does the tensor of slot `index` still look at this copy, in the form it was brought in?"""
        slot = self.box.slots[index]
        tensor, chunk = slot.tensor, self.chunks[slot.chunk]
        there = tensor.device == chunk.device and tensor.data_ptr() == chunk.data_ptr() + slot.begin
        return there and (tensor.dtype, tensor.shape, tensor.stride()) == (slot.dtype, slot.size, slot.stride)


@dataclass(eq=False)
class Group:
    """Components that move as one (one, or several that share weights).

    `version` counts the changes of its weights that were seen; where `marked`, `mark` is what they looked like after
    the last move.
    """

    names: tuple[str, ...]
    modules: tuple[torch.nn.Module, ...]
    stage: str
    alternates: bool = False
    size_bytes: int = 0
    marked: bool = False
    inside: bool = True
    busy: int = 0
    version: int = 0
    boxes: list[StoredTensors] = field(default_factory=list)
    loans: list[DeviceCopy] = field(default_factory=list)
    mark: Any = None

    @property
    def name(self) -> str:
        """Names of its components."""
        return "+".join(self.names)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Its plain tensors as they are now, each once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for module in self.modules:
            for name, tensor in tensors_of(module):
                found.setdefault(id(tensor), (name, tensor))
        return list(found.values())

    def at_home(self) -> set[int]:
        """Ids of the tensors that look at the store."""
        return {id(s.tensor) for box in self.boxes for i, s in enumerate(box.slots) if box.holds(i)}


@dataclass
class Moved:
    """What moves cost: bytes brought in, bytes written to the store, and seconds waited."""

    in_bytes: int = 0
    out_bytes: int = 0
    wait_s: float = 0.0

    def add(self, other: Moved) -> None:
        """Count another move as well."""
        self.in_bytes += other.in_bytes
        self.out_bytes += other.out_bytes
        self.wait_s += other.wait_s


class Residency:
    """Moves units between a store and the device. Not thread-safe: the owner holds a lock."""

    def __init__(self, units: list[Group], store: Store, device: torch.device) -> None:
        self.units, self.store, self.device = units, store, device
        self.first_device = device

    @property
    def inside_bytes(self) -> int:
        """Weight bytes of the units that are in."""
        return sum(unit.size_bytes for unit in self.units if unit.inside)

    @host_edit
    def put_away(self, unit: Group) -> Moved:
        """Let a unit's tensors look at the store; what changed, or never lay there, is written first.

        An error of the store leaves the unit in memory, whole.
        """
        started = time.perf_counter()
        written = sum(map(_end, unit.loans))
        unit.loans.clear()
        home = unit.at_home()
        strangers = pack((name, tensor) for name, tensor in unit.tensors() if id(tensor) not in home)
        if strangers.slots:
            box = self.store.put(strangers, unit.name)
            unit.boxes.append(box)
            box.park()
            _let_pages_go(box)
            written += strangers.nbytes
        for box in [b for b in unit.boxes if not any(b.holds(i) for i in range(len(b.slots)))]:
            unit.boxes.remove(box)
            box.close()
        unit.inside, unit.version = False, unit.version + bool(written)
        unit.size_bytes = _size(unit)
        unit.mark = _mark(unit) if unit.marked else None
        return Moved(0, written, time.perf_counter() - started)

    @host_edit
    def bring_in(self, unit: Group) -> Moved:
        """Bring a unit's bytes to the compute device."""
        started, moved = time.perf_counter(), 0
        for box in unit.boxes:
            held = [i for i in range(len(box.slots)) if box.holds(i)]
            if not held:
                continue  # it is in already, or somebody replaced all of it
            loan = _fetch(box, self.device)
            unit.loans.append(loan)
            for index in held:
                slot = box.slots[index]
                slot.tensor.data = slot.on(loan.chunks[slot.chunk])
            moved += box.nbytes
        for _, tensor in unit.tensors():
            if tensor.device != self.device:  # loaded since, and not yet in the store
                tensor.data = tensor.data.to(self.device)
                moved += tensor.numel() * tensor.element_size()
        unit.inside, unit.size_bytes = True, _size(unit)
        unit.mark = _mark(unit) if unit.marked else None
        return Moved(moved, 0, time.perf_counter() - started)

    def bring_home(self, unit: Group) -> None:
        """Give a unit back for good, to the devices it came from (the new one, where the pipeline was moved)."""
        if unit.loans:
            self.put_away(unit)
        for box in unit.boxes:
            box.give_back()
            box.close()
        unit.boxes.clear()
        unit.inside = True
        for _, tensor in unit.tensors() if self.device != self.first_device else ():
            if tensor.device == self.first_device:
                tensor.data = tensor.data.to(self.device)

    def is_away(self, unit: Group) -> bool:
        """Is every byte of it in the store (nobody moved, added or replaced anything since)?"""
        if unit.inside:
            return False
        home = unit.at_home()
        return all(id(tensor) in home for _, tensor in unit.tensors())

    def see_changes(self, unit: Group, deeply: bool = True) -> None:
        """Raise the unit's version where its weights are not what they were after the last move.

        PyTorch counts writes through parameters; `deeply` also looks at some words of each tensor that is away,
        which shows what is merged through `.data`.
        """
        if unit.mark is None:
            return
        now = _mark(unit, deeply)
        if now != unit.mark[: len(now)]:
            unit.version += 1
            unit.mark = _mark(unit)

    def strange_device(self) -> torch.device | None:
        """A GPU that somebody moved weights to (`pipe.to`), or None."""
        for unit in self.units:
            if not unit.inside:
                for _, tensor in unit.tensors():
                    if tensor.device.type not in ("cpu", "meta") and tensor.device != self.device:
                        return tensor.device
        return None


def _size(unit: Group) -> int:
    return sum(nbytes for box in unit.boxes for _, nbytes, _ in box.layout)


def _mark(unit: Group, deeply: bool = True) -> tuple[Any, ...]:
    """Which tensors these are, where they lie, how often PyTorch saw them written; then words of those away."""
    seen = tuple((id(tensor), tensor.data_ptr(), tensor._version) for _, tensor in unit.tensors())
    if not deeply:
        return (seen,)
    if unit.inside:
        return seen, ()
    return seen, tuple(_words(box) for box in unit.boxes)


def _words(box: StoredTensors) -> bytes:
    """A few words of each tensor in a box. Files are read rather than touched through their map, which would count
    whole stretches of them as this process's memory."""
    found = bytearray()
    for at, nbytes, _ in box.layout:
        for place in spread(nbytes):
            size = min(8, nbytes - place)
            if box.fd is not None:
                found += os.pread(box.fd, size, box.base + at + place)
            else:
                found += box.flat[at + place : at + place + size].numpy().tobytes()
    return bytes(found)


def _end(loan: DeviceCopy) -> int:
    """Put what changed while it was in into the store, and let the tensors look there; returns the bytes written."""
    written = 0
    for (at, span), before in zip(loan.spans, loan.checksums, strict=True):
        if checksum(span) != before:
            loan.box.flat[at : at + span.numel()].copy_(span)
            written += span.numel()
    for i, (slot, parked) in enumerate(zip(loan.box.slots, loan.box.parked, strict=True)):
        if loan.holds(i):
            slot.tensor.data = parked
    if written:
        _let_pages_go(loan.box)
    return written


def _fetch(box: StoredTensors, device: torch.device) -> DeviceCopy:
    """A copy of a box on the device. On a CPU its memory goes back to the system with it, which the heap's often
    would not."""
    if device.type == "cpu":
        area = _private(box.nbytes)
        box.read(memoryview(area))
        chunks = [torch.frombuffer(area, dtype=torch.uint8, count=n, offset=at) for at, n, _ in box.layout]
        spans = [(0, torch.frombuffer(area, dtype=torch.uint8, count=box.nbytes))]
    else:
        chunks = [torch.empty(n, dtype=torch.uint8, device=device) for _, n, _ in box.layout]
        spans = [(at, chunk) for (at, _, _), chunk in zip(box.layout, chunks, strict=True)]
        for at, chunk in spans:
            for begin, piece in _pieces(box, at, chunk.numel()):
                chunk[begin : begin + piece.numel()].copy_(piece)
        torch.cuda.synchronize(device)
    return DeviceCopy(box, chunks, spans, [checksum(span) for _, span in spans])


def _let_pages_go(box: StoredTensors) -> None:
    """Unmap the pages of a file that were touched: they would count as this process's memory."""
    if box.fd is not None and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(box.flat.data_ptr()), ctypes.c_size_t(box.nbytes), mmap.MADV_DONTNEED)


def indexed(device: torch.device) -> torch.device:
    """The device as tensors name it: "cuda" is the current one of several."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def trim() -> None:
    """Give memory that was freed back to the system, where the C library keeps it (glibc)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # musl has none
            libc.malloc_trim(0)


def _private(count_bytes: int) -> mmap.mmap:
    flags = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return mmap.mmap(-1, max(1, count_bytes), **flags)


def _pieces(box: StoredTensors, at: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes of a box from `at` on as host tensors, with their offsets; from a file a small piece at a time."""
    if box.fd is None:
        yield 0, box.flat[at : at + nbytes]
        return
    area = bytearray(min(nbytes, CHUNK_BYTES))
    for begin in range(0, nbytes, CHUNK_BYTES):
        size, done = min(CHUNK_BYTES, nbytes - begin), 0
        while done < size:
            done += _read(box, memoryview(area)[done:size], at + begin + done)
        yield begin, torch.frombuffer(area, dtype=torch.uint8, count=size)


def _read(box: StoredTensors, into: memoryview, at: int) -> int:
    assert box.fd is not None
    count = os.preadv(box.fd, [into], box.base + at)
    if not count:
        raise DiffaccelError(f"offload: {box.path} was cut short by somebody: its weights are lost")
    return count
