"""One module of a model whose input is taken out and replaced, for the length of a `with`.

This is how strips go through an autoencoder without a line of its code: a run over the whole map gives a stub of two
by two pixels to what comes behind a module, a run over one strip gives a stub to what comes before it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ...errors import UnsupportedModelError

STUB = 2  # pixels a side; one would be too few for reflected padding
Swap = Callable[[int, torch.Tensor], torch.Tensor]


class ReplaceInput:
    """`swap(n, x)` stands in for the first argument `x` of the n-th call of `module` in this thread; `calls` counts.

    Raises:
        UnsupportedModelError: on leaving, if the module was never called (a compiled graph runs past hooks).
    """

    def __init__(self, module: torch.nn.Module, swap: Swap) -> None:
        self.module, self.swap = module, swap
        self.calls = 0
        self.thread = 0
        self.handle: Any = None

    def __enter__(self) -> ReplaceInput:
        self.thread = get_ident()
        self.handle = self.module.register_forward_pre_hook(self._hook)
        return self

    def _hook(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if get_ident() != self.thread:
            return None
        if not args or not isinstance(args[0], torch.Tensor):
            raise UnsupportedModelError(f"{type(module).__name__} was called without a map as its first argument")
        call, self.calls = self.calls, self.calls + 1
        return (self.swap(call, args[0]), *args[1:])

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.handle.remove()
        if kind is None and not self.calls:
            raise UnsupportedModelError(f"{type(self.module).__name__} never ran, so nothing could be cut into strips")


def stub(x: torch.Tensor) -> torch.Tensor:
    """A corner of the map `x` [..., H, W]: [..., 2, 2] (less where `x` has less)."""
    return x[..., :STUB, :STUB].contiguous()


class Untouched:
    """Puts back, on leaving, every attribute of the autoencoder itself (Wan keeps its frame cache there).

    Its tiling is off inside.

    Modules, parameters and buffers are not looked at: decoding does not change them.
    """

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.before: dict[str, Any] = {}

    def __enter__(self) -> Untouched:
        attributes = vars(self.vae)
        self.before = dict(attributes)
        if "use_tiling" in attributes:
            attributes["use_tiling"] = False
        return self

    def __exit__(self, *error: Any) -> None:
        attributes = vars(self.vae)
        for name in [name for name in attributes if name not in self.before]:
            del attributes[name]
        attributes.update(self.before)
