"""Products counted while modules run: 2 FLOPs for a multiply and an add, in linear layers, attention and convolutions.

A torch-function mode sees every product before a backend takes it apart, so the numbers are the same on meta, on the
CPU and on a GPU (torch's `FlopCounterMode` sees no attention on fake CPU tensors). Layers that keep their weights
otherwise (quantized, GGUF) count as their shapes, and what happens inside them does not. Masks change nothing:
attention is counted dense.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_PRODUCTS = {torch.matmul, torch.bmm, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm}
_ADDED = {torch.baddbmm, torch.addmm, torch.Tensor.baddbmm, torch.Tensor.addmm}
_NONZERO = {torch.nonzero, torch.Tensor.nonzero}
_DATA = {torch.Tensor.__bool__, torch.Tensor.__getitem__, torch.Tensor.__invert__, *_NONZERO}
_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
_TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}


@dataclass
class Counts:
    """FLOPs by kind, and for linear layers the weights that so many rows passed through.

    Attributes:
        linear, attention, conv: FLOPs.
        weights_by_rows: {rows: sum of in x out over the linear layers that were given so many rows}.
        sequences: {(queries, keys): calls of attention with these lengths}.
    """

    linear: int = 0
    attention: int = 0
    conv: int = 0
    weights_by_rows: Counter[int] = field(default_factory=Counter)
    sequences: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All of it."""
        return self.linear + self.attention + self.conv


class Meter(TorchFunctionMode):
    """Counts what runs inside `with Meter(modules) as meter`, in `meter.counts`."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        super().__init__()
        self.counts = Counts()
        self._modules = modules
        self._handles: list[Any] = []
        self._inside = 0  # of layers that count as their shapes
        self._negated: set[int] = set()  # masks on meta that are taken for empty
        self._held: list[torch.Tensor] = []  # so that their ids stay theirs

    def __enter__(self) -> Meter:
        for module in self._modules:
            for part in module.modules():
                if _is_shaped(part):
                    self._handles.append(part.register_forward_pre_hook(self._enter_layer))
                    self._handles.append(part.register_forward_hook(self._leave_layer, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_layer(self, layer: Any, args: Any) -> None:
        if self._inside == 0 and args:
            self._linear(args[0].numel() // args[0].shape[-1], layer.in_features, layer.out_features)
        self._inside += 1

    def _leave_layer(self, layer: Any, args: Any, output: Any) -> None:
        self._inside -= 1

    def _linear(self, rows: int, inner: int, outer: int) -> None:
        self.counts.linear += 2 * rows * inner * outer
        self.counts.weights_by_rows[rows] += inner * outer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DATA and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return self._unknown(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if self._inside == 0:
            if func is F.linear:
                given, weight = _two(args, kwargs, "input", "weight")
                self._linear(given.numel() // given.shape[-1], weight.shape[1], weight.shape[0])
            elif func in _PRODUCTS:
                self._product(*_two(args, kwargs, "input", "other"))
            elif func in _ADDED:
                self._product(args[1], args[2])
        result = func(*args, **kwargs)
        if func in _CONVOLUTIONS or func in _TRANSPOSED:
            given, weight = _two(args, kwargs, "input", "weight")
            places = (given if func in _TRANSPOSED else result).numel() // (
                given.shape[1] if func in _TRANSPOSED else result.shape[1]
            )
            self.counts.conv += 2 * places * weight.numel()  # [out, in / groups, ...]: groups are in its shape
        return result

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What would need data, on meta: all masks are full, so that nothing is left out, and negated ones empty."""
        if func is torch.Tensor.__bool__:
            return True
        if func is torch.Tensor.__getitem__:
            place = args[1]
            if isinstance(place, torch.Tensor) and place.dtype == torch.bool:
                kept = 0 if id(place) in self._negated else place.numel()
                return args[0].new_empty(kept, *args[0].shape[place.dim() :])
            return func(*args, **kwargs)
        if func in _NONZERO:
            mask = args[0]
            places = mask.new_empty(0 if id(mask) in self._negated else mask.numel(), mask.dim(), dtype=torch.int64)
            return places.unbind(1) if kwargs.get("as_tuple") else places
        result = func(*args, **kwargs)
        self._negated.add(id(result))
        self._held.append(result)
        return result

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries, keys = query.shape[-2], key.shape[-2]
        heads = query.numel() // (queries * query.shape[-1])  # with the batch
        self.counts.attention += 2 * heads * queries * keys * (query.shape[-1] + value.shape[-1])
        self.counts.sequences[queries, keys] += 1
        if query.is_meta:  # as kernels do: without a [queries, keys] matrix
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        self._inside += 1
        try:
            return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        finally:
            self._inside -= 1

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        if left.dim() >= 2 and right.dim() >= 2:
            batch = math.prod(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))
            self.counts.attention += 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _is_shaped(part: torch.nn.Module) -> bool:
    """A layer with a linear layer's shape that is no plain one, and holds no further layer with a shape."""
    shaped = hasattr(part, "in_features") and hasattr(part, "out_features")
    return shaped and type(part).forward is not torch.nn.Linear.forward


def _two(args: Any, kwargs: Any, first: str, second: str) -> tuple[Any, Any]:
    return (
        args[0] if args else kwargs[first],
        args[1] if len(args) > 1 else kwargs[second],
    )
