"""The peak of live tensors while a module runs, seen at the dispatcher; nothing needs to exist (meta tensors).

Counted are storages that operators make, until their last tensor is gone. Parameters, the allocator's fragments and
the workspaces of cuDNN and cuBLAS are not. Run it inside a `Meter`: by itself, attention on meta makes a matrix
[queries, keys], which kernels do not keep.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """`peak_bytes`: the most that was alive at once; `live_bytes`: what is alive now; `given` tensors are."""

    def __init__(self, given: Any = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}
        for tensor in tree_leaves(given):
            self._note(tensor)

    def _note(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key, 0)

    def hold(self, module: torch.nn.Module) -> PeakMemory:
        """Leave the tensors of `module` out of the count."""
        for tensor in [*module.parameters(), *module.buffers()]:
            self._known[tensor.untyped_storage()._cdata] = 0
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            self._note(value)
        return result
