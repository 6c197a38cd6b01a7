"""Who has quantized a model before: a pipeline of ours, or a library that the model was loaded with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..core.accelerator import Target
from ..core.compat import unwrap_module
from ..core.holders import Holders
from ..errors import clipped
from ..models.quantizers import quantized_by

HOLDERS: Holders[Any] = Holders()  # the pipeline that has quantized a model


def quantized_before(parts: Iterable[tuple[str, nn.Module]]) -> str:
    """Why weights of these (component, model) cannot be quantized here, or "": another library has done it, to all
    layers or to some of them. What pipelines of ours did is not told here."""
    for component, module in parts:
        plain = unwrap_module(module)
        if HOLDERS.of(plain) is not None:
            continue
        library, layer = quantized_by(plain)
        if library:
            at = f" (as {clipped(layer)})" if layer else ""
            return (
                f"{component}: the weights are quantized already, by {library}{at}: load the model in high precision, "
                "or leave quantization off"
            )
    return ""


def denoisers(target: Target) -> list[tuple[str, nn.Module]]:
    """The denoisers of a pipeline by name."""
    found = ((name, getattr(target.pipe, name, None)) for name in target.spec.denoisers)
    return [(name, module) for name, module in found if module is not None]
