"""Exchange the weights of layers for quantized ones, and back: parameters change, layers stay the objects they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..core.accelerator import Target
from ..core.chain import compiled_body
from ..core.compat import CASTING, GROUP_OFFLOAD, REGISTRY, copies_held
from ..core.hooked_forward import HF_HOOK
from ..core.unloaded import judged_by_shape
from ..core.wrappers import own_modules, sharded
from ..errors import UnsupportedModelError
from ..models.fusions import FUSED
from .backends import Convert
from .originals import Kept, Originals
from .plain_loads import refuse_plain_loads
from .weights import tensor_bytes

ON_META = (
    "is away: accelerate's offload (enable_sequential_cpu_offload or a device_map) lets it in for a call only. "
    "Take that off first, and use an offload of diffaccel in its place"
)


# Hooks of diffusers that hold on to a model's parameters, or cast them.
HOLDING_HOOKS = {
    GROUP_OFFLOAD: "diffusers' group offload holds the model's weights: quantize first, then offload",
    CASTING: "diffusers' layerwise casting stores the weights without scales: load the model without it",
}


def on_meta(module: nn.Module, name: str) -> bool:
    """Is the weight of a layer a stand-in without bytes, where bytes are wanted?"""
    weight = module.get_submodule(name)._parameters.get("weight")
    return weight is not None and weight.device.type == "meta" and not judged_by_shape()


def taken_away(layer: nn.Module) -> bool:
    """Does accelerate's offload hold the layer's weights (under their names of now), to let them in for a call?"""
    hook = vars(layer).get(HF_HOOK)
    hooks = getattr(hook, "hooks", (hook,))
    tensors = itertools.chain(layer._parameters.values(), layer._buffers.values())
    return any(getattr(one, "offload", False) for one in hooks) or any(
        tensor is not None and tensor.device.type == "meta" and not judged_by_shape() for tensor in tensors
    )


def held_of(target: Target, more: Iterable[str] = ()) -> str:
    """`held` of the denoisers and of the components named in `more`."""
    for component in (*target.spec.denoisers, *more):
        module = getattr(target.pipe, component, None)
        why = held(component, module) if isinstance(module, nn.Module) else ""
        if why:
            return why
    return ""


def held(component: str, module: nn.Module) -> str:
    """Who holds on to a model's weights so that they cannot be exchanged, and what to do about it; "" for nobody."""
    if sharded(module) is not None:
        return f"{component} is cut into shards by FSDP: quantize the plain model, before it is sharded"
    for name, child in own_modules(module).items():
        for hook in getattr(getattr(child, REGISTRY, None), "hooks", {}):
            if hook in HOLDING_HOOKS:
                return f"{component}: {HOLDING_HOOKS[hook]}"
        if isinstance(child, nn.Linear) and taken_away(child):
            return f"{component}: the weight of {name} {ON_META}"
    return ""


def fused_into(module: nn.Module, name: str) -> str:
    """The fused layer that computes in place of the named one (`fuse_qkv_projections()`), or ""."""
    path, _, last = name.rpartition(".")
    attention = module.get_submodule(path)
    for fused, parts in FUSED.items():
        if last in parts and isinstance(getattr(attention, fused, None), nn.Module):
            processor = getattr(attention, "processor", None)
            by_processor = any("Fused" in cls.__name__ for cls in type(processor).__mro__)
            # Newer classes ask themselves; older ones have a processor of another class, and keep what they fused.
            asks_itself = hasattr(attention, "unfuse_projections")
            if getattr(attention, "fused_projections", False) and (asks_itself or by_processor):
                return f"{path}.{fused}" if path else fused
    return ""


def fused_since(component: str, module: nn.Module, names: Iterable[str]) -> str:
    """Why these layers cannot be changed or undone now: fused ones compute in their place. "" where none do."""
    found = {name: fused for name in names if (fused := fused_into(module, name))}
    if not found:
        return ""
    name, fused = next(iter(found.items()))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{name}{more} is computed by the fused {fused}: call {component}.unfuse_qkv_projections() first"


def cast_in_graphs(module: nn.Module, layers: Mapping[str, nn.Module]) -> str:
    """Why the next call would fail, or "": diffusers' layerwise casting exchanges parameters in every call, and those
    of a tensor subclass cannot be exchanged while compiled code refers to them."""
    cast = next(
        (n for n, layer in layers.items() if CASTING in getattr(getattr(layer, REGISTRY, None), "hooks", ())), ""
    )
    if not cast or all(compiled_body(child) is None for child in module.modules()):
        return ""
    return (
        f"layerwise casting (enable_layerwise_casting) came after it on {cast}, and cannot cast quantized weights in "
        "compiled blocks: load the model without it, or call pipe.disable_compile()"
    )


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
    undos: list[Callable[[], None]] = field(default_factory=list)
    fused_before: frozenset[str] = frozenset()  # layers that fused ones stood in for when they were quantized

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Name of each quantized layer -> the layer."""
        return {swap.kept.name.removesuffix(".weight"): swap.layer for swap in self.swaps}

    def replaced(self) -> list[str]:
        """Names of the layers that are others by now, or hold a weight that is not quantized."""
        found, present = [], own_modules(self.module)
        for swap in self.swaps:
            name = swap.kept.name.removesuffix(".weight")
            weight = swap.layer._parameters.get("weight")
            same = weight is swap.quantized or type(weight) is type(swap.quantized)
            if not same or present.get(name) is not swap.layer:
                found.append(name)
        return found

    def put_on(self, names: Sequence[str], convert: Convert) -> None:
        """Quantize the weights of the named layers. On an error nothing stays changed."""
        self.fused_before = frozenset(name for name in names if fused_into(self.module, name))
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
            self.undos.append(refuse_plain_loads(self.module, names))
        except BaseException:
            self.take_off()
            raise

    def lost(self, component: str) -> str:
        """Why the originals cannot be put back now, or ""."""
        fused = fused_since(component, self.module, (name for name in self.layers if name not in self.fused_before))
        if fused:
            return fused
        for swap in self.swaps:
            if taken_away(swap.layer):
                return f"the weight of {swap.kept.name.removesuffix('.weight')} {ON_META}"
        return copies_held(self.module) or self.originals.lost()

    def take_off(self) -> None:
        """Give every layer its own parameter back (one that somebody has replaced since stays)."""
        while self.undos:
            self.undos.pop()()
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
