"""A plain state dict is not loaded over quantized layers: refused before the first tensor is copied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import IncompatibleError


def refuse_plain_loads(module: nn.Module, names: Collection[str]) -> Callable[[], None]:
    """Let `module.load_state_dict` refuse a plain weight for one of the named layers; returns the undo."""
    undo: Callable[[], None] = module.register_load_state_dict_pre_hook(
        functools.partial(_refuse, frozenset(names))
    ).remove
    return undo


def _refuse(names: Collection[str], module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name in names:
        value = state.get(f"{prefix}{name}.weight")
        if value is not None and type(value.data) in (torch.Tensor, nn.Parameter):
            raise IncompatibleError(
                f"load_state_dict: {prefix}{name} is quantized and takes no plain weight: call "
                "pipe.disable_quantization() first, load, and quantize again"
            )
