"""The tensors of a module as plain bytes: where they lie, what they share, and how to point them elsewhere.

A tensor is moved by rebinding its `.data`, so that the Parameter object, its place in the `state_dict`, its shape,
strides and dtype stay what they were. A quantized weight (a tensor subclass that wraps others) keeps its wrapper:
the plain tensors inside are rebound. State that a library keeps beside its parameters moves as well
(`models/quantizers.py` says where it is).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.compat import host_edit
from ..core.unloaded import judged_by_shape
from ..errors import IncompatibleError
from ..models.quantizers import WITH_STATE, following_state, moving_state, unknown_state

ALIGN = 64  # bytes: kernels sum in another order where an address modulo this is another one
PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One tensor of some packed tensors: `begin` is the byte at which it starts, in the chunk it lies in."""

    name: str
    tensor: torch.Tensor
    chunk: int
    begin: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def on(self, memory: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """The same form over other memory (uint8, flat), whose byte `offset` is the start of the chunk."""
        at = (memory.storage_offset() + offset + self.begin) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), at, self.size, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A stretch of memory that one tensor, or several that overlap, lie in; `offset` is where it is packed."""

    offset: int
    nbytes: int
    source: torch.Tensor  # uint8, flat
    origin: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensors:
    """Some tensors laid out one behind the other; `nbytes` with the gaps.

    The offset of a chunk modulo ALIGN is that of the address it came from, so that kernels compute the same bits.
    """

    views: tuple[View, ...]
    chunks: tuple[Chunk, ...]
    nbytes: int


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of this very module (not of those below), with their names."""
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                yield name, tensor


def tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every plain tensor in a module, once: parameters and buffers, and what is inside of quantized ones.

    Raises IncompatibleError, naming the tensor, where one cannot be moved by rebinding.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, child in module.named_modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if tensor is None or id(tensor) in found:
                    continue
                full = f"{path}.{name}" if path else name
                # The common case without a generator: every run asks for every weight of its blocks.
                if type(tensor) in PLAIN and tensor.layout == torch.strided and tensor.device.type != "meta":
                    odd = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
                    if not odd and tensor.numel():
                        found[id(tensor)] = (full, tensor)
                    if not odd:
                        continue
                for inner_name, inner in plain_tensors(full, tensor):
                    found.setdefault(id(inner), (inner_name, inner))
        for name, inner in moving_state(child) if type(child).__name__ in WITH_STATE else ():
            found.setdefault(id(inner), (f"{path}.{name}", inner))
    return list(found.values())


def follow(module: torch.nn.Module, device: torch.device) -> list[tuple[Any, str, torch.Tensor]]:
    """Small state of quantized weights that stays in memory goes to the device as a copy; returns what stood there:
    (holder, attribute, tensor)."""
    before = []
    for child in module.modules():
        for parameter in child._parameters.values():
            for holder, name, tensor in following_state(parameter) if type(parameter) not in PLAIN else ():
                if tensor.device != device:
                    before.append((holder, name, tensor))
                    setattr(holder, name, tensor.to(device))
    return before


def plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself, or the plain ones that a wrapper class holds; empty tensors are left out."""
    if type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, part)
            if not isinstance(inner, torch.Tensor):  # a DTensor's device mesh
                raise IncompatibleError(f"{name}: a {type(tensor).__name__} is no plain memory, it has a {part}")
            if getattr(tensor, part) is not inner:
                raise IncompatibleError(f"{name}: {type(tensor).__name__} makes its {part} anew each time")
            yield from plain_tensors(f"{name}.{part}", inner)
    elif tensor.numel():
        why = _immovable(tensor)
        if why:
            raise IncompatibleError(f"{name}: {why}")
        yield name, tensor
        if type(tensor) not in PLAIN:
            for part, inner in moving_state(tensor):
                yield f"{name}.{part}", inner


def _immovable(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if kind not in PLAIN and unknown_state(tensor):
        return f"a {kind.__name__} keeps part of its state outside of its data ({unknown_state(tensor)})"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return f"a {str(tensor.layout).removeprefix('torch.')} {kind.__name__} is not plain memory"
    if tensor.is_inference():
        return "made under torch.inference_mode(), hence fixed to its memory: load the model outside of it"
    if tensor.device.type == "meta" and not judged_by_shape():
        return "on the meta device: no weights are loaded"
    return ""


def address(tensor: torch.Tensor) -> int:
    """Where a tensor begins. On meta, nowhere: each storage is then taken to lie far from all others."""
    if tensor.device.type != "meta":
        return tensor.data_ptr()
    storage: int = tensor.untyped_storage()._cdata
    return (storage << 48) + int(tensor.storage_offset()) * tensor.element_size()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """(first byte, byte after the last) that a strided tensor refers to."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = address(tensor)
    return begin, begin + (steps + 1) * tensor.element_size()


@host_edit
def pack(tensors: Iterable[tuple[str, torch.Tensor]], origin: torch.device | None = None) -> PackedTensors:
    """Lay tensors out one behind the other; those that overlap in memory go on overlapping.

    `origin` is the device they are to go back to one day, in place of the one they are on.
    """
    rows = [(str(t.device), *span(t), at, name, t) for at, (name, t) in enumerate(tensors)]
    views: list[View] = []
    chunks: list[Chunk] = []
    offset = 0
    for cluster in sorted(_overlapping(rows), key=lambda found: min(row[3] for row in found)):
        begin, end, first = cluster[0][1], max(row[2] for row in cluster), cluster[0][5]
        for _, low, _, _, name, tensor in cluster:
            if (low - begin) % tensor.element_size():
                raise IncompatibleError(f"{name} overlaps another tensor at an address that is not its own multiple")
            views.append(View(name, tensor, len(chunks), low - begin, tensor.dtype, tensor.shape, tensor.stride()))
        at = aligned(offset) + begin % ALIGN
        chunks.append(Chunk(at, end - begin, _bytes(first, end - begin), origin or first.device))
        offset = at + end - begin
    return PackedTensors(tuple(views), tuple(chunks), aligned(offset))


def _overlapping(rows: Iterable[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    """Rows of (device, begin, end, ...) in groups that overlap in memory; each begins with its lowest, longest one."""
    groups: list[list[tuple[Any, ...]]] = []
    end = 0
    for row in sorted(rows, key=lambda row: (row[0], row[1], -row[2])):
        if groups and row[0] == groups[-1][0][0] and row[1] < end:
            groups[-1].append(row)
            end = max(end, row[2])
        else:
            groups.append([row])
            end = row[2]
    return groups


def _bytes(first: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The memory from a tensor's first byte on."""
    storage = first.untyped_storage()
    start = first.storage_offset() * first.element_size()
    if start + nbytes > storage.nbytes():
        raise IncompatibleError("two weights overlap in memory that does not belong to one storage")
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, start, (nbytes,), (1,))


def shared_between(components: Iterable[torch.nn.Module], blocks: Sequence[torch.nn.Module]) -> set[int]:
    """Ids of the plain tensors whose memory more than one block, or a block and anything else, refers to."""
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for child in block.modules():
            owners.setdefault(id(child), set()).add(index)
    spans: list[tuple[str, int, int, int, int]] = []
    seen: set[int] = set()
    for component in components:
        for child in component.modules():
            if id(child) in seen:
                continue
            seen.add(id(child))
            for name, tensor in own_tensors(child):
                for owner in owners.get(id(child), {-1}):
                    spans += [(str(t.device), *span(t), owner, id(t)) for t in _lenient(name, tensor, owner)]
            for owner in owners.get(id(child), {-1}) if type(child).__name__ in WITH_STATE else ():
                spans += [(str(t.device), *span(t), owner, id(t)) for _, t in moving_state(child) if t.numel()]
    groups = [group for group in _overlapping(spans) if len({row[3] for row in group}) > 1]
    return {row[4] for group in groups for row in group}


def _lenient(name: str, tensor: torch.Tensor, owner: int) -> list[torch.Tensor]:
    try:
        return [inner for _, inner in plain_tensors(name, tensor)]
    except IncompatibleError:
        if owner >= 0:
            raise
        return []  # of no block: it stays where it is
