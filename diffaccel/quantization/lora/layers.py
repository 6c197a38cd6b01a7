"""A low-rank branch beside a layer, or merged into its weight; either is put on as a whole and taken off bit by bit.

The layer object stays the one it was: for a branch only its class changes, to a subclass that all such layers share,
so that its place, its hooks, its state dict and code that asks for `nn.Linear` go on. The branch computes in the
model's own precision also where the weight is in 8 or 4 bits.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...core.compat import OLD_FORWARD
from .files import Pair

BRANCH = "_diffaccel_lora"  # attribute of a layer: its `Branch`
BRANCHED = "_diffaccel_branched"  # class attribute of the subclasses: the class of the layer without a branch
Loaded = Sequence[tuple[str, Pair, float]]  # (adapter, pair, strength)


class Branch:
    """All adapters of one layer side by side: down [R, ...], and up [out, R, ...] with strengths and scales in it."""

    def __init__(self, loaded: Loaded, dtype: torch.dtype, device: torch.device) -> None:
        self.down = torch.cat([pair.down for _, pair, _ in loaded]).to(device, dtype)
        ups = [pair.up.float() * (pair.scale * strength) for _, pair, strength in loaded]
        self.up = torch.cat(ups, 1).to(device, dtype)

    def move(self, device: torch.device) -> None:
        """Follow the layer's input to another device."""
        if self.down.device != device:
            self.down, self.up = self.down.to(device), self.up.to(device)


class _BranchedLinear:
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(input)  # type: ignore[misc]
        branch: Branch = getattr(self, BRANCH)
        branch.move(input.device)
        extra = F.linear(F.linear(input.to(branch.down.dtype), branch.down), branch.up)
        return output + extra.to(output.dtype)


class _BranchedConv:
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(input)  # type: ignore[misc]
        own: Any = self
        branch: Branch = getattr(self, BRANCH)
        branch.move(input.device)
        middle = F.conv2d(
            input.to(branch.down.dtype), branch.down, None, own.stride, own.padding, own.dilation, own.groups
        )
        return output + F.conv2d(middle, branch.up).to(output.dtype)


_CLASSES: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _branched(cls: type) -> type:
    found = _CLASSES.get(cls)
    if found is None:
        base = _BranchedLinear if issubclass(cls, torch.nn.Linear) else _BranchedConv
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, BRANCHED: cls}
        found = _CLASSES[cls] = type(cls.__name__, (base, cls), body)
    return found


def own_class(layer: torch.nn.Module) -> type:
    """The class of a layer without its branch."""
    found: type = vars(type(layer)).get(BRANCHED, type(layer))
    return found


def compute_dtype(layer: torch.nn.Module, otherwise: torch.dtype) -> torch.dtype:
    """The precision a branch computes in: the weight's where it is one to compute in, else the model's."""
    weight = getattr(layer, "weight", None)
    plain = isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1
    return weight.dtype if plain and isinstance(weight, torch.Tensor) else otherwise


def mergeable(layer: torch.nn.Module) -> bool:
    """Is the layer's weight a plain floating-point tensor of 16 bits or more, in which a sum can be kept?"""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or type(weight.data) is not torch.Tensor:
        return False
    return weight.is_floating_point() and weight.dtype.itemsize > 1 and weight.device.type != "meta"


def put_on(layer: Any, loaded: Loaded, dtype: torch.dtype, merge: bool) -> tuple[str, Callable[[], None]]:
    """Let the adapters act on a layer. Returns ("merged" | "low-rank branch" | "branch", the undo)."""
    if merge and mergeable(layer):
        return "merged", _merge(layer, loaded)
    if hasattr(layer, "with_extra_branch"):
        return "low-rank branch", _widen(layer, loaded)
    cls = type(layer)
    device = next(iter(layer.parameters())).device
    device = torch.device("cpu") if device.type == "meta" else device
    setattr(layer, BRANCH, Branch(loaded, compute_dtype(layer, dtype), device))
    layer.__class__ = _branched(cls)

    def undo() -> None:
        layer.__class__ = cls
        vars(layer).pop(BRANCH, None)
        for key in ("forward", OLD_FORWARD):  # accelerate, put on since, keeps the forward it found
            held = vars(layer).get(key)
            if getattr(held, "__func__", None) in (_BranchedLinear.forward, _BranchedConv.forward):
                vars(layer)[key] = types.MethodType(cls.forward, layer)

    return "branch", undo


def bypassed(layer: torch.nn.Module) -> bool:
    """Does something hold the layer's forward, so that a branch would not be computed?"""
    return "forward" in vars(layer) and BRANCH not in vars(layer)


def _merge(layer: Any, loaded: Loaded) -> Callable[[], None]:
    before = layer.weight.data
    total = before.float()
    for _, pair, strength in loaded:
        up, down = pair.up.to(before.device).float(), pair.down.to(before.device).float()
        total = total + (up.flatten(1) @ down.flatten(1)).view(before.shape) * (pair.scale * strength)
    merged = total.to(before.dtype)
    layer.weight.data = merged

    def undo() -> None:
        layer.weight.data = before

    return undo


def _widen(layer: Any, loaded: Loaded) -> Callable[[], None]:
    """More rank in the branch that a 4-bit layer has anyway."""
    names = [f"lora.{name}" for name, _, _ in loaded]
    for name, (_, pair, strength) in zip(names, loaded, strict=True):
        layer.with_extra_branch(name, pair.down, pair.up, strength * pair.scale)

    def undo() -> None:
        for name in reversed(names):
            layer.without_extra_branch(name)

    return undo
