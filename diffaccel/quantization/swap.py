"""Exchange the weights of layers for quantized ones, and back: parameters change, layers stay the objects they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import UnsupportedModelError
from .backends import Convert
from .originals import Kept, Originals
from .weights import tensor_bytes

ON_META = (
    "is away: accelerate's offload (enable_sequential_cpu_offload or a device_map) lets it in for a call only. "
    "Take that off first, and use an offload of diffaccel in its place"
)


def on_meta(module: nn.Module, name: str) -> bool:
    """Is the weight of a layer a stand-in without bytes?"""
    weight = module.get_submodule(name)._parameters.get("weight")
    return weight is not None and weight.device.type == "meta"


@dataclass(eq=False)
class _Swap:
    layer: nn.Module
    quantized: nn.Parameter
    kept: Kept


@dataclass(eq=False)
class Swapped:
    """The quantized layers of one model."""

    module: nn.Module
    originals: Originals
    swaps: list[_Swap] = field(default_factory=list)
    plain_bytes: int = 0
    quantized_bytes: int = 0

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Name of each quantized layer -> the layer."""
        return {swap.kept.name.removesuffix(".weight"): swap.layer for swap in self.swaps}

    def replaced(self) -> list[str]:
        """Names of the layers that are others by now, or hold a weight that is not quantized."""
        found, present = [], dict(self.module.named_modules())
        for swap in self.swaps:
            name = swap.kept.name.removesuffix(".weight")
            weight = swap.layer._parameters.get("weight")
            same = weight is swap.quantized or type(weight) is type(swap.quantized)
            if not same or present.get(name) is not swap.layer:
                found.append(name)
        return found

    def put_on(self, names: Sequence[str], convert: Convert) -> None:
        """Quantize the weights of the named layers. On an error nothing stays changed."""
        made: dict[int, nn.Parameter] = {}  # a parameter that two layers share is quantized once
        try:
            for name in names:
                layer = self.module.get_submodule(name)
                parameter = layer._parameters["weight"]
                assert parameter is not None, name
                quantized = made.get(id(parameter))
                if quantized is None:
                    self.plain_bytes += tensor_bytes(parameter)
                    quantized = made[id(parameter)] = _quantized(name, parameter, convert)
                    self.quantized_bytes += tensor_bytes(quantized)
                    kept = self.originals.take(f"{name}.weight", parameter)
                else:
                    kept = next(s.kept for s in self.swaps if s.quantized is quantized)
                layer._parameters["weight"] = quantized
                self.swaps.append(_Swap(layer, quantized, kept))
                made[id(parameter)] = quantized
        except BaseException:
            self.take_off()
            raise

    def take_off(self) -> None:
        """Give every layer its own parameter back (one that somebody has replaced since stays)."""
        back: dict[int, nn.Parameter] = {}
        for swap in reversed(self.swaps):
            now = swap.layer._parameters.get("weight")
            if now is not swap.quantized and type(now) is not type(swap.quantized):
                continue
            if id(swap.kept) not in back:
                parameter = self.originals.put_back(swap.kept, now.device)
                if now.dtype != swap.kept.dtype and now.dtype.is_floating_point:  # the model was cast since
                    parameter.data = parameter.data.to(now.dtype)
                back[id(swap.kept)] = parameter
            swap.layer._parameters["weight"] = back[id(swap.kept)]
        self.swaps.clear()
        self.originals.close()


def _quantized(name: str, parameter: nn.Parameter, convert: Convert) -> nn.Parameter:
    quantized = convert(parameter)
    scale = getattr(quantized, "scale", None)
    if isinstance(scale, torch.Tensor) and not bool(torch.isfinite(scale).all()):
        raise UnsupportedModelError(f"the weight of {name} has values that are not finite: it cannot be scaled")
    return nn.Parameter(quantized, requires_grad=False)


def replaced_in_words(names: Sequence[str], layers: int) -> str:
    """A clause about quantized layers that somebody has replaced; "" where there is none."""
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{len(names)} of {layers} layers have other weights since ({names[0]}{more}), and compute with these"


def users(module: nn.Module, names: Sequence[str]) -> frozenset[int]:
    """Ids of the named layers' weights that something else in the model uses too."""
    chosen = {f"{name}.weight" for name in names}
    mine = {id(p) for n, p in module.named_parameters(remove_duplicate=False) if n in chosen}
    others = {id(p) for n, p in module.named_parameters(remove_duplicate=False) if n not in chosen}
    return frozenset(mine & others)


def foreign(module: nn.Module, names: Sequence[str]) -> tuple[str, str] | None:
    """(name, kind) of the first named layer whose weight is no ordinary tensor any more."""
    for name in names:
        weight = module.get_submodule(name)._parameters.get("weight")
        if weight is None:
            return name, "no weight"
        inner = weight.data
        if type(inner) is not torch.Tensor:
            return name, type(inner).__name__
        if not weight.dtype.is_floating_point or weight.element_size() == 1:
            return name, str(weight.dtype)
    return None
