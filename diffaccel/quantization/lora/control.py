"""Control LoRAs: the input layer gets the inputs that the file has more than the model, as columns of zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .pairs import padded

CONFIG = {"x_embedder": "in_channels"}  # layer -> what the model's config calls its inputs


def widen(module: torch.nn.Module, name: str, width: int) -> Callable[[], None]:
    """Give a linear layer of a model `width` inputs, and its config the same number.

    The layer object and its parameter stay; the undo gives back their bits, and the config what it said.
    """
    layer: Any = module.get_submodule(name)
    before, inputs = layer.weight.data, layer.in_features
    layer.weight.data = padded(before, width)
    layer.in_features = width
    config, key = getattr(module, "config", None), CONFIG.get(name.rpartition(".")[2])
    said = getattr(config, key, None) if key is not None else None
    if key is not None and said is not None:
        object.__setattr__(config, key, width)

    def undo() -> None:
        layer.weight.data = before
        layer.in_features = inputs
        if key is not None and said is not None:
            object.__setattr__(config, key, said)

    return undo
