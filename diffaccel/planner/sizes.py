"""Bytes of a pipeline's components, and what a device must hold of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..core.compat import unwrap_module

if TYPE_CHECKING:
    from ..core.protocols import Pipeline


class Needs(NamedTuple):
    """GiB on the device by where weights lie; `by_layer` is None where layers cannot take turns. `decoding`: alone."""

    resident: float
    by_stage: float
    by_layer: float | None
    decoding: float


def component_bytes(pipe: Pipeline) -> dict[str, int]:
    """Bytes of the parameters of each component that is a module."""
    return {
        name: sum(_bytes(p) for p in unwrap_module(component).parameters())
        for name, component in pipe.components.items()
        if isinstance(component, torch.nn.Module)
    }


def _bytes(tensor: object) -> int:
    """Bytes of a tensor; of one that wraps others (a quantized weight), theirs."""
    if not isinstance(tensor, torch.Tensor):
        return 0  # a DTensor lists its device mesh among its parts
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is None or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.numel() * tensor.element_size()
    return sum(_bytes(getattr(tensor, name)) for name in inner()[0])
