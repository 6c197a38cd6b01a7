"""How far the pixels of a map reach into what a network makes of them, read off the operations that it runs.

Each convolution reaches half its kernel further, counted in lines of the map that went in. Operations on single
pixels and views reach no further; whatever else runs (statistics over the map, attention, noise, anything unknown)
is a reason to refuse. Run under fake tensors this costs no arithmetic.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Sizes of the map while its reach is read: no channel or frame count is a multiple of them, so a size says what it is.
HEIGHT, WIDTH = 29, 31

# Operations that keep pixels where they are; anything pointwise or a view is let through without a name.
LOCAL = frozenset(
    {
        "_to_copy", "alias", "arange", "cat", "clone", "copy_", "detach", "device", "empty", "empty_like", "fill_",
        "full", "full_like", "lift_fresh", "new_full", "new_zeros", "ones", "ones_like", "repeat", "repeat_interleave",
        "scalar_tensor", "stack", "unbind", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d", "_unsafe_view", "zeros", "zeros_like", "index_select",
    }
)  # fmt: skip
SUMS = frozenset({"amax", "amin", "linalg_vector_norm", "mean", "norm", "sum", "var", "var_mean"})
PADS = frozenset({"constant_pad_nd", "reflection_pad2d", "reflection_pad3d", "replication_pad2d", "replication_pad3d"})
WORDS = {
    "native_group_norm": "a group norm, whose statistics are those of the whole map",
    "native_batch_norm": "a batch norm, whose statistics may be those of the whole map",
    "rand": "random numbers, one per pixel of the map",
    "scaled_dot_product": "attention over the whole map",
}


def is_spatial(size: int) -> bool:
    """Does an axis of this many lines hold pixels of the measured map (or multiples of them)?"""
    return size > 1 and (size % HEIGHT == 0 or size % WIDTH == 0)


class ReceptiveField(TorchDispatchMode):
    """Adds up, while `on`, the reach of what runs on a map of HEIGHT x WIDTH lines (or multiples).

    `why` says what must not run in strips, or None.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reach = [Fraction(0), Fraction(0)]  # of the call that runs
        self.most = [Fraction(0), Fraction(0)]  # of any call so far
        self.why: str | None = None
        self.on = False

    def total(self) -> tuple[Fraction, Fraction]:
        """(rows, columns), in lines of the measured map."""
        self.start()
        return self.most[0], self.most[1]

    def start(self) -> None:
        """Another call begins, e.g. that of the next frame: reaches add up within one call only."""
        self.most = [max(pair) for pair in zip(self.most, self.reach, strict=True)]
        self.reach = [Fraction(0), Fraction(0)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.on and self.why is None:
            self._see(func, args, kwargs or {}, output)
        return output

    def _see(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if name == "convolution":
            self._convolution(*args)
        elif name in PADS:
            self._pad(args[0], args[1])
        elif name in SUMS or name == "native_layer_norm":
            self._sum(name, args, kwargs)
        elif name in ("mm", "addmm"):
            if is_spatial(args[-1].shape[0]):
                self.why = "a product over the whole map"
        elif name == "slice":
            self._slice(args[0], output, kwargs.get("dim", args[1] if len(args) > 1 else 0))
        elif not (name in LOCAL or torch.Tag.pointwise in func.tags or func.is_view):
            known = next((words for part, words in WORDS.items() if part in name), None)
            self.why = known or f"{name}, whose reach over the map is not known"

    def _convolution(
        self, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
    ) -> None:
        if rest[0]:  # transposed
            self.why = "a transposed convolution, whose reach over the map is not known"
            return
        for i in (-2, -1):
            kernel = (weight.shape[i] - 1) * dilation[i]
            lines = x.shape[i] + 2 * padding[i] - kernel  # as many as come out at stride 1
            if kernel:
                self.reach[i] += Fraction(kernel, 1 if stride[i] > 1 else 2) * (HEIGHT, WIDTH)[i] / max(lines, 1)

    def _pad(self, x: Any, widths: Any) -> None:
        """Padding of both sides alike leaves pixels in place; of one side it shifts them."""
        for i, (left, right) in enumerate(zip(widths[0::2], widths[1::2], strict=True)):
            if i < 2 and is_spatial(x.shape[-1 - i]):
                self.reach[1 - i] += abs(Fraction(left - right)) * (HEIGHT, WIDTH)[1 - i] / x.shape[-1 - i]

    def _sum(self, name: str, args: Any, kwargs: Any) -> None:
        x = args[0]
        if name == "native_layer_norm":
            dims = list(range(-len(args[1]), 0))
        else:
            position = 2 if name in ("linalg_vector_norm", "norm") else 1
            dims = kwargs.get("dim", args[position] if len(args) > position else None)
            dims = list(range(x.ndim)) if dims is None else ([dims] if isinstance(dims, int) else list(dims))
        if any(is_spatial(x.shape[dim]) for dim in dims):
            self.why = f"{name} over the whole map"

    def _slice(self, x: Any, output: Any, dim: int) -> None:
        if is_spatial(x.shape[dim]) and output.shape[dim] != x.shape[dim]:
            self.why = "a slice of the map"
