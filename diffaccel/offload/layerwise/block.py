"""One block of a denoiser whose weights are evicted between its calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.chain import Link
from ...core.compat import host_edit, unwrap_module
from ..packing import PLAIN, tensors_of
from ..store import StoredTensors
from ..transfer import Buffer

# A tensor of the block, the same tensor as it lies in the store, and how that one looks.
Row = tuple[torch.Tensor, torch.Tensor, int, torch.dtype, torch.Size, tuple[int, ...]]


class Block:
    """What the prefetcher moves.

    What every entry of the block asks (do its tensors still point at the store, were they written to?) is prepared
    by `set_stored`, so that an entry is one loop over the tensors, without a call per tensor.

    Attributes:
        label, component: its name, and the denoiser it belongs to.
        stored: where its tensors lie; set by `set_stored`.
        offsets: the same, each with its first byte in a buffer.
        nbytes: bytes of a buffer that holds the block.
        generation: counts the changes of `stored`.
    """

    def __init__(self, index: int, label: str, component: str, module: torch.nn.Module) -> None:
        self.index, self.label, self.component, self.module = index, label, component, module
        self.link: Link | None = None
        self.bound: list[torch.Tensor] | None = None  # what its tensors look at while it computes
        self.generation = -1
        self.set_stored([])

    def set_stored(self, stored: list[StoredTensors]) -> None:
        """Take these for the block's weights from now on."""
        self.stored, self.generation = stored, self.generation + 1
        self.offsets: list[tuple[StoredTensors, int]] = []
        at = 0
        for one in stored:
            self.offsets.append((one, at))
            at += one.nbytes
        self.nbytes = at
        self.rows: tuple[Row, ...] = tuple(
            (view.tensor, mapped, mapped.data_ptr(), mapped.dtype, mapped.shape, mapped.stride())
            for one in stored
            for view, mapped in zip(one.views, one.mapped, strict=True)
        )
        # Layers of other libraries may replace their own weight while they compute (bitsandbytes does, for some CPUs).
        self.wilful = any(type(row[0]) not in PLAIN for row in self.rows)

    def versions(self) -> list[int] | None:
        """How often each tensor was written to in place; None where one does not look at the store as it was left."""
        found = []
        for tensor, _, address, dtype, shape, stride in self.rows:
            if (
                tensor.data_ptr() != address
                or tensor.dtype != dtype
                or tensor.shape != shape
                or tensor.stride() != stride
            ):
                return None
            found.append(tensor._version)
        return found

    def bind(self, buffer: Buffer) -> None:
        """Point the tensors into a buffer that holds the block."""
        key = (self.index, self.generation)
        views = buffer.views.get(key)
        if views is None:
            views = buffer.views[key] = self._views(buffer)
        for row, view in zip(self.rows, views, strict=True):
            row[0].data = view
        self.bound = views

    @host_edit
    def _views(self, buffer: Buffer) -> list[torch.Tensor]:
        memory = buffer.data.untyped_storage()
        start, device = buffer.data.storage_offset(), buffer.data.device
        found = []
        for one, at in self.offsets:
            for view in one.views:
                empty = torch.empty(0, dtype=view.dtype, device=device)
                first = (start + at + one.layout[view.chunk][0] + view.begin) // view.dtype.itemsize
                found.append(empty.set_(memory, first, view.size, view.stride))
        return found

    def evict(self, versions: Sequence[int] | None = None) -> None:
        """Point the tensors at the store; what was written to since `versions` (while it computed) goes along.

        A weight that its own layer replaced stays as it is, so that `versions` tells the next entry to store it.
        """
        if versions is not None:
            for row, version in zip(self.rows, versions, strict=True):
                if row[0]._version != version:
                    self._write_back(versions)
                    break
        bound, self.bound = self.bound, None
        kept = self._replaced(bound) if bound is not None and self.wilful else ()
        for row in self.rows:
            if not kept or id(row[0]) not in kept:
                row[0].data = row[1]

    def _replaced(self, bound: list[torch.Tensor]) -> set[int]:
        """Ids of the tensors that do not look where they were bound to any more. What came up beside them may look
        into the buffer, which the next block will fill: it gets memory of its own."""
        found = {id(row[0]) for row, view in zip(self.rows, bound, strict=True) if _elsewhere(row[0], view)}
        if found:
            known = {id(row[0]) for row in self.rows}
            for _, tensor in tensors_of(unwrap_module(self.module)):
                if id(tensor) not in known:
                    tensor.data = tensor.data.clone()
        return found

    def _write_back(self, versions: Sequence[int]) -> None:
        with torch.no_grad():
            for (tensor, mapped, *_), version in zip(self.rows, versions, strict=True):
                if tensor._version != version and tensor.shape == mapped.shape:
                    mapped.copy_(tensor.detach())


def _elsewhere(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return tensor.data_ptr() != view.data_ptr() or tensor.shape != view.shape
