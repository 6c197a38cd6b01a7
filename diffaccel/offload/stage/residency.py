"""Which weights are resident and which are evicted: groups that move between a store and the compute device.

Nothing here relies on what a module looked like before: each move looks at its tensors as they are now, so that
weights that were loaded, merged, cast or replaced since are taken as they are. A group that computed with unchanged
weights is evicted without a byte written, which a checksum of all of them tells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.compat import host_edit
from ..host_memory import discard_pages, private_mapping, read_file
from ..packing import follow, pack, tensors_of
from ..store import Store, StoredTensors
from .checksum import checksum, spread
from .peak import CHUNK_BYTES


@dataclass(eq=False)
class DeviceCopy:
    """The copy of what is stored: a flat tensor per chunk, each with a storage of its own.

    `spans` are the stretches that checksums are taken of, with their places in it.
    """

    stored: StoredTensors
    chunks: list[torch.Tensor]
    spans: list[tuple[int, torch.Tensor]]
    checksums: list[tuple[int, int]] = field(default_factory=list)

    def holds(self, index: int) -> bool:
        """Does the tensor of view `index` still look at this copy, in the form it was brought in?"""
        view = self.stored.views[index]
        tensor, chunk = view.tensor, self.chunks[view.chunk]
        there = tensor.device == chunk.device and tensor.data_ptr() == chunk.data_ptr() + view.begin
        return there and (tensor.dtype, tensor.shape, tensor.stride()) == (view.dtype, view.size, view.stride)


@dataclass(eq=False)
class Group:
    """Components that move as one (one, or several that share weights).

    `version` counts the changes of its weights that were seen; where `fingerprinted`, `fingerprint` is what they
    looked like after the last move. `followed` is what stood in the place of state that was copied to the device.
    """

    names: tuple[str, ...]
    modules: tuple[torch.nn.Module, ...]
    stage: str
    alternates: bool = False
    size_bytes: int = 0
    fingerprinted: bool = False
    resident: bool = True
    busy: int = 0
    version: int = 0
    stored: list[StoredTensors] = field(default_factory=list)
    copies: list[DeviceCopy] = field(default_factory=list)
    followed: list[tuple[Any, str, torch.Tensor]] = field(default_factory=list)
    fingerprint: Any = None

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

    def evicted_ids(self) -> set[int]:
        """Ids of the tensors that look at the store."""
        return {id(s.tensor) for stored in self.stored for i, s in enumerate(stored.views) if stored.holds(i)}


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
    """Moves groups between a store and the device. Not thread-safe: the owner holds a lock."""

    def __init__(self, groups: list[Group], store: Store, device: torch.device) -> None:
        self.groups, self.store, self.device = groups, store, device
        self.first_device = device

    @property
    def resident_bytes(self) -> int:
        """Weight bytes of the groups that are in."""
        return sum(group.size_bytes for group in self.groups if group.resident)

    @host_edit
    def evict(self, group: Group) -> Moved:
        """Let a group's tensors look at the store; what changed, or never lay there, is written first.

        An error of the store leaves the group in memory, whole.
        """
        started = time.perf_counter()
        written = sum(map(_end, group.copies))
        group.copies.clear()
        evicted = group.evicted_ids()
        unstored = pack((name, tensor) for name, tensor in group.tensors() if id(tensor) not in evicted)
        if unstored.views:
            stored = self.store.put(unstored, group.name)
            group.stored.append(stored)
            stored.evict()
            _discard(stored)
            written += unstored.nbytes
        for stored in [b for b in group.stored if not any(b.holds(i) for i in range(len(b.views)))]:
            group.stored.remove(stored)
            stored.close()
        group.resident, group.version = False, group.version + bool(written)
        group.size_bytes = _size(group)
        group.fingerprint = _fingerprint(group) if group.fingerprinted else None
        return Moved(0, written, time.perf_counter() - started)

    @host_edit
    def load(self, group: Group) -> Moved:
        """Bring a group's bytes to the compute device."""
        started, moved = time.perf_counter(), 0
        for stored in group.stored:
            held = [i for i in range(len(stored.views)) if stored.holds(i)]
            if not held:
                continue  # it is in already, or somebody replaced all of it
            copy = _fetch(stored, self.device)
            group.copies.append(copy)
            for index in held:
                view = stored.views[index]
                view.tensor.data = view.on(copy.chunks[view.chunk])
            moved += stored.nbytes
        for _, tensor in group.tensors():
            if tensor.device != self.device:  # loaded since, and not yet in the store
                tensor.data = tensor.data.to(self.device)
                moved += tensor.numel() * tensor.element_size()
        for module in group.modules:
            group.followed += follow(module, self.device)
        group.resident, group.size_bytes = True, _size(group)
        group.fingerprint = _fingerprint(group) if group.fingerprinted else None
        return Moved(moved, 0, time.perf_counter() - started)

    def give_back(self, group: Group) -> None:
        """Give a group back for good, to the devices it came from (the new one, where the pipeline was moved)."""
        if group.copies:
            self.evict(group)
        for stored in group.stored:
            stored.give_back()
            stored.close()
        group.stored.clear()
        group.resident = True
        while group.followed:
            holder, name, tensor = group.followed.pop()
            setattr(holder, name, tensor)
        for _, tensor in group.tensors() if self.device != self.first_device else ():
            if tensor.device == self.first_device:
                tensor.data = tensor.data.to(self.device)

    def is_evicted(self, group: Group) -> bool:
        """Is every byte of it in the store (nobody moved, added or replaced anything since)?"""
        if group.resident:
            return False
        evicted = group.evicted_ids()
        return all(id(tensor) in evicted for _, tensor in group.tensors())

    def see_changes(self, group: Group, deeply: bool = True) -> None:
        """Raise the group's version where its weights are not what they were after the last move.

        PyTorch counts writes through parameters; `deeply` also looks at some words of each evicted tensor,
        which shows what is merged through `.data`.
        """
        if group.fingerprint is None:
            return
        now = _fingerprint(group, deeply)
        if now != group.fingerprint[: len(now)]:
            group.version += 1
            group.fingerprint = _fingerprint(group)

    def foreign_device(self) -> torch.device | None:
        """A GPU that somebody moved weights to (`pipe.to`), or None."""
        for group in self.groups:
            if not group.resident:
                for _, tensor in group.tensors():
                    if tensor.device.type not in ("cpu", "meta") and tensor.device != self.device:
                        return tensor.device
        return None


def _size(group: Group) -> int:
    return sum(nbytes for stored in group.stored for _, nbytes, _ in stored.layout)


def _fingerprint(group: Group, deeply: bool = True) -> tuple[Any, ...]:
    """Which tensors these are, where they lie, how often PyTorch saw them written; then words of those evicted."""
    seen = tuple((id(tensor), tensor.data_ptr(), tensor._version) for _, tensor in group.tensors())
    if not deeply:
        return (seen,)
    if group.resident:
        return seen, ()
    return seen, tuple(_words(stored) for stored in group.stored)


def _words(stored: StoredTensors) -> bytes:
    """A few words of each stored tensor. Files are read rather than touched through their map, which would count whole
    stretches of them as this process's memory."""
    found = bytearray()
    for at, nbytes, _ in stored.layout:
        for place in spread(nbytes):
            size = min(8, nbytes - place)
            if stored.fd is not None:
                found += os.pread(stored.fd, size, stored.base + at + place)
            else:
                found += stored.flat[at + place : at + place + size].numpy().tobytes()
    return bytes(found)


def _end(copy: DeviceCopy) -> int:
    """Put what changed while it was in into the store, and let the tensors look there; returns the bytes written."""
    written = 0
    for (at, span), before in zip(copy.spans, copy.checksums, strict=True):
        if checksum(span) != before:
            copy.stored.flat[at : at + span.numel()].copy_(span)
            written += span.numel()
    for i, (view, mapped) in enumerate(zip(copy.stored.views, copy.stored.mapped, strict=True)):
        if copy.holds(i):
            view.tensor.data = mapped
    if written:
        _discard(copy.stored)
    return written


def _fetch(stored: StoredTensors, device: torch.device) -> DeviceCopy:
    """A copy on the device. On a CPU its memory goes back to the system with it, which the heap's often would not."""
    if device.type == "cpu":
        area = private_mapping(stored.nbytes)
        stored.read(memoryview(area))
        chunks = [torch.frombuffer(area, dtype=torch.uint8, count=n, offset=at) for at, n, _ in stored.layout]
        spans = [(0, torch.frombuffer(area, dtype=torch.uint8, count=stored.nbytes))]
    else:
        chunks = [torch.empty(n, dtype=torch.uint8, device=device) for _, n, _ in stored.layout]
        spans = [(at, chunk) for (at, _, _), chunk in zip(stored.layout, chunks, strict=True)]
        for at, chunk in spans:
            for begin, piece in _pieces(stored, at, chunk.numel()):
                chunk[begin : begin + piece.numel()].copy_(piece)
        torch.cuda.synchronize(device)
    return DeviceCopy(stored, chunks, spans, [checksum(span) for _, span in spans])


def _discard(stored: StoredTensors) -> None:
    if stored.fd is not None:
        discard_pages(stored.flat.data_ptr(), stored.nbytes)


def indexed(device: torch.device) -> torch.device:
    """The device as tensors name it: "cuda" is the current one of several."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _pieces(stored: StoredTensors, at: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The stored bytes from `at` on as host tensors, with their offsets; from a file a small piece at a time."""
    if stored.fd is None:
        yield 0, stored.flat[at : at + nbytes]
        return
    area = bytearray(min(nbytes, CHUNK_BYTES))
    for begin in range(0, nbytes, CHUNK_BYTES):
        size = min(CHUNK_BYTES, nbytes - begin)
        read_file(stored.fd, memoryview(area)[:size], stored.base + at + begin, stored.path)
        yield begin, torch.frombuffer(area, dtype=torch.uint8, count=size)
