"""`ScaledWeight`: a quantized weight that sits in an ordinary layer in place of its parameter.

To the layer (and to peft, diffusers, a state dict) it is a parameter of the old shape and dtype; inside are 8-bit
codes and their scales. `F.linear` with it does the scheme's product; any other operation sees the dequantized values.
A cast (`.to(torch.bfloat16)`) changes the dtype it presents and nothing inside, so no scale is ever lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as tree

from ..errors import IncompatibleError
from . import formats

DYNAMIC, WEIGHT_ONLY, STORAGE = "dynamic", "weight_only", "storage"
_aten = torch.ops.aten


class ScaledWeight(torch.Tensor):
    """A weight [N, ...] as codes (FP8 or int8, same shape) and scales (float32, [N, 1, ...] or [1, 1, ...]).

    `scheme` is "dynamic" (activations are quantized too), "weight_only" (scales applied to the product) or "storage"
    (dequantized before use).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    scheme: str

    @staticmethod
    def __new__(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        scheme: str = WEIGHT_ONLY,
        *,
        requires_grad: bool = False,
    ) -> ScaledWeight:
        """From codes, scales and the dtype to present; or, as libraries do that make parameters anew as
        `type(parameter)(value, requires_grad=...)` (accelerate's offload), from another ScaledWeight alone."""
        if isinstance(codes, ScaledWeight):
            again = codes.rebuilt(torch.Tensor.detach)
            again._is_param = True
            return again
        if scale is None or dtype is None:
            raise IncompatibleError(
                "a quantized weight cannot be made of plain values: call pipe.disable_quantization() first"
            )
        made: ScaledWeight = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device, requires_grad=False
        )
        made.codes, made.scale, made.scheme = codes, scale, scheme
        return made

    @classmethod
    def of(cls, weight: torch.Tensor, kind: torch.dtype, scheme: str, rows: bool = True) -> ScaledWeight:
        """Quantize a weight."""
        codes, scale = formats.quantize_weight(weight.detach(), kind, rows)
        return cls(codes, scale, weight.dtype, scheme)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, as an ordinary tensor."""
        return formats.dequantize(self.codes, self.scale, dtype or self.dtype)

    def rebuilt(
        self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
    ) -> ScaledWeight:
        """A weight of the same kind, with `change` applied to the tensors inside."""
        return ScaledWeight(change(self.codes), change(self.scale), dtype or self.dtype, self.scheme)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, str]]:
        return ["codes", "scale"], (self.dtype, self.scheme)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: tuple[torch.dtype, str], outer_size: Any, outer_stride: Any
    ) -> ScaledWeight:
        dtype, scheme = context
        return cls(inner["codes"], inner["scale"], dtype, scheme)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "int8" if self.codes.dtype is torch.int8 else "fp8"
        shape = f"shape={tuple(self.shape)}, dtype={self.dtype}"
        return f"ScaledWeight({kind}, {self.scheme}, {shape}, scales={self.scale.numel()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.codes, self.scale, self.dtype, self.scheme, isinstance(self, nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = _rebuild(
            self.codes.clone(), self.scale.clone(), self.dtype, self.scheme, isinstance(self, nn.Parameter)
        )
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        if func is torch.Tensor.data_ptr:  # the place by which libraries tell weights apart
            return args[0].codes.data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], ScaledWeight):
            return special(func, *args, **kwargs)
        if func is _aten.cat.default:
            raise IncompatibleError(
                "quantized weights cannot be put together (fuse_qkv_projections): call pipe.disable_quantization() "
                "first, fuse, and quantize again"
            )
        if func._schema.is_mutable:
            raise IncompatibleError(
                f"{func}: a quantized weight cannot be written in place (merging an adapter into it, loading a plain "
                "state dict over it): call pipe.disable_quantization() first, or keep the adapter as a branch"
            )
        plain_args, plain_kwargs = tree.tree_map_only(ScaledWeight, ScaledWeight.dequantize, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, ScaledWeight) or isinstance(input, ScaledWeight):
        plain = [t.dequantize() if isinstance(t, ScaledWeight) else t for t in (input, weight, bias)]
        return functional.linear(*plain)  # type: ignore[arg-type]
    if weight.scheme == STORAGE:
        return functional.linear(input, weight.dequantize(input.dtype), bias)
    product = formats.dynamic if weight.scheme == DYNAMIC else formats.weight_only
    return product(input, weight.codes, weight.scale, bias)


def _same_inside(func: Any, weight: ScaledWeight, *_: Any, **kwargs: Any) -> ScaledWeight:
    """detach, alias, clone: the same operation on what is inside."""
    return weight.rebuilt(lambda inner: func(inner, **kwargs))


def _to_copy(func: Any, weight: ScaledWeight, *, dtype: torch.dtype | None = None, **kwargs: Any) -> ScaledWeight:
    """A move, or a cast: the cast changes only the dtype the weight presents."""
    if dtype is not None and not dtype.is_floating_point:
        raise IncompatibleError(f"a quantized weight cannot be cast to {dtype}")
    return weight.rebuilt(lambda inner: func(inner, **kwargs), dtype)


def _copy(func: Any, target: ScaledWeight, source: Any, *_: Any) -> ScaledWeight:
    """`copy_`: from another quantized weight of the same make (a state dict taken from the same model)."""
    alike = isinstance(source, ScaledWeight) and (source.codes.dtype, source.scale.shape, source.shape) == (
        target.codes.dtype,
        target.scale.shape,
        target.shape,
    )
    if not alike:
        raise IncompatibleError(
            f"a plain tensor cannot be copied into a quantized weight ({target!r}): call pipe.disable_quantization() "
            "first, load, and quantize again"
        )
    target.codes.copy_(source.codes)
    target.scale.copy_(source.scale)
    return target


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same_inside,
    _aten.alias.default: _same_inside,
    _aten.clone.default: _same_inside,
    _aten._pin_memory.default: _same_inside,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
}


def _rebuild(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, scheme: str, parameter: bool) -> Any:
    made = ScaledWeight(codes, scale, dtype, scheme)
    return nn.Parameter(made, requires_grad=False) if parameter else made


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of a wrapper subclass (ours, torchao's, quanto's), those of the tensors inside."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor.numel() * tensor.element_size()
    parts = (getattr(tensor, name) for name in flatten()[0])  # of a DTensor, one is its device mesh
    return sum(tensor_bytes(part) for part in parts if isinstance(part, torch.Tensor))


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a model's parameters and buffers as they lie in memory."""
    found = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor_bytes(tensor) for tensor in found.values())


def gib_of(sizes: Iterable[int]) -> float:
    """Their sum in GiB, as a plan shows it."""
    return round(sum(sizes) / 1024**3, 4)


torch.serialization.add_safe_globals([_rebuild, ScaledWeight])


def holds_scaled(component: Any) -> bool:
    """Does a component of a pipeline hold 8-bit weights of ours?"""
    return isinstance(component, torch.nn.Module) and any(
        isinstance(parameter.data, ScaledWeight) or isinstance(parameter, ScaledWeight)
        for parameter in component.parameters()
    )
