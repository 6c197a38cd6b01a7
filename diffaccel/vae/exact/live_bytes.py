"""Bytes of live tensors: what a piece of code holds at once, on any device, without an allocator to ask.

Counts whole storages that came to be while the tracker is on. What a kernel allocates within one operation (the
workspace of a convolution) is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as live:` ... `live.peak_bytes`, `live.now_bytes`; storages made before are not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._old: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, new=False)
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, new=True)
        return output

    def _see(self, tensor: torch.Tensor, new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._old:
            return
        if not new:
            self._old.add(key)
            weakref.finalize(storage, self._old.discard, key)
            return
        self._sizes[key] = storage.nbytes()
        self.now_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now_bytes -= self._sizes.pop(key, 0)
