"""A low-rank branch beside a layer, or merged into its weight; either is put on as a whole and taken off bit by bit.

The layer object stays the one it was: for a branch only its class changes, to a subclass that all such layers share,
so that its place, its hooks, its state dict and code that asks for `nn.Linear` go on. The branch computes in the
model's own precision also where the weight is in 8 or 4 bits.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...core.chain import held_forwards
from ...core.classes import SharedSubclasses
from .branch import Branch, summed
from .call_scale import CallScale
from .pairs import POINTWISE, Pair, Replaced, is_linear, padded

BRANCH = "_diffaccel_lora"  # attribute of a layer: its `Branch`
Loaded = Sequence[tuple[str, Pair | Replaced, float]]  # (adapter, what it adds, strength)


def _linear_forward(cls: Any) -> Callable[..., torch.Tensor]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        branch: Branch | None = getattr(self, BRANCH, None)
        if branch is None:  # taken off, and somebody who came in between goes on calling this
            own: torch.Tensor = type(self).forward(self, input)
            return own
        output = cls.forward(self, input)
        branch.move(input.device)
        low = F.linear(input.to(branch.down.dtype).contiguous(), branch.down)  # (one product, as torch with gradients)
        return branch.add(output, low, F.linear)

    return forward


def _conv_forward(cls: Any) -> Callable[..., torch.Tensor]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """[B, in, ...] -> [B, out, ...], as the convolution it extends."""
        branch: Branch | None = getattr(self, BRANCH, None)
        if branch is None:
            own: torch.Tensor = type(self).forward(self, input)
            return own
        output = cls.forward(self, input)
        branch.move(input.device)
        low = self._conv_forward(input.to(branch.down.dtype), branch.down, None)
        return branch.add(output, low, POINTWISE[branch.up.ndim])

    return forward


_BRANCHED = SharedSubclasses("_diffaccel_branched")


def _branched(cls: type) -> type:
    make = _conv_forward if issubclass(cls, torch.nn.modules.conv._ConvNd) else _linear_forward
    return _BRANCHED.of(cls, lambda plain: {"forward": make(plain)})


def own_class(layer: torch.nn.Module) -> type:
    """The class of a layer without its branch."""
    return _BRANCHED.plain(type(layer))


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


def dense_weight(layer: Any) -> torch.Tensor | None:
    """What the layer multiplies with, [out, ...] floating point; None where its codes cannot be read here."""
    if hasattr(layer, "dense_weight"):
        found: torch.Tensor = layer.dense_weight()
        return found
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    if type(weight).dequantize is not torch.Tensor.dequantize:
        return weight.detach().dequantize()
    plain = type(weight.data) is torch.Tensor and weight.is_floating_point()
    return weight.detach() if plain and weight.shape[0] == _outputs(layer) else None


def _outputs(layer: Any) -> int:
    return int(layer.out_features if hasattr(layer, "out_features") else layer.out_channels)


def refusal(layer: Any, added: Pair | Replaced) -> str:
    """Why this cannot act on the layer as it is now, or ""."""
    if isinstance(added, Replaced):
        return "" if mergeable(layer) else "its weight is quantized and cannot be replaced"
    if added.magnitude is not None and dense_weight(layer) is None:
        return f"a DoRA needs the values of its weight, which {type(layer.weight).__name__} does not give"
    if is_linear(layer) and added.down.shape[1] > layer.in_features and not mergeable(layer):
        return "its weight is quantized, and the LoRA makes the layer wider: keep this layer out of the quantization"
    return ""


def put_on(
    layer: Any, loaded: Loaded, dtype: torch.dtype, merge: bool, scale: CallScale
) -> tuple[str, Callable[[], None]]:
    """Let the adapters act on a layer.

    Args:
        loaded: (adapter, what it adds, strength), in order.
        dtype: what a branch computes in where the weight has no such dtype itself.
        merge: add them to the weight where it can hold the sum (a layer without a bias cannot hold one).
        scale: what branches follow: the factor that one call asks for.

    Returns:
        ("replaced" | "merged" | "low-rank branch" | "branch", the undo).
    """
    replaced = [added.value for _, added, _ in loaded if isinstance(added, Replaced)]
    if replaced:
        return "replaced", _hold(layer, {"weight": replaced[-1]})
    pairs = [(name, added, strength) for name, added, strength in loaded if isinstance(added, Pair)]
    biased = any(pair.bias is not None for _, pair, _ in pairs)
    if merge and mergeable(layer) and not (biased and layer.bias is None):
        return "merged", _merge(layer, pairs)
    if hasattr(layer, "with_extra_branch") and all(pair.plain for _, pair, _ in pairs):
        scale.followers.append(layer)
        return "low-rank branch", _extra_branches(layer, pairs)
    undo = _branch(layer, pairs, dtype)
    scale.followers.append(getattr(layer, BRANCH))
    return "branch", undo


def _branch(layer: Any, pairs: Sequence[tuple[str, Pair, float]], dtype: torch.dtype) -> Callable[[], None]:
    cls = type(layer)
    device = next(itertools.chain(layer.parameters(), layer.buffers())).device
    device = torch.device("cpu") if device.type == "meta" else device
    dora = any(pair.magnitude is not None for _, pair, _ in pairs)
    weight = dense_weight(layer) if dora else None
    width = layer.in_features if is_linear(layer) else layer.in_channels
    branch = Branch(pairs, compute_dtype(layer, dtype), device, width, weight, layer.bias if dora else None)
    setattr(layer, BRANCH, branch)
    branched: Any = _branched(cls)
    layer.__class__ = branched
    _hand_over(layer, cls.forward, branched.forward)  # hooks that came before hold the forward they found

    def undo() -> None:
        layer.__class__ = cls
        vars(layer).pop(BRANCH, None)
        _hand_over(layer, branched.forward, cls.forward)  # and those that came since, this one

    return undo


def _hand_over(layer: Any, old: Any, new: Any) -> None:
    for place, key in held_forwards(layer, old):
        place[key] = types.MethodType(new, layer)


def bypassed(layer: torch.nn.Module) -> bool:
    """Does something hold the layer's forward where it cannot be exchanged, so that a branch would not be computed?"""
    held = "forward" in vars(layer) and BRANCH not in vars(layer)
    return held and not held_forwards(layer, type(layer).forward)


def _merge(layer: Any, pairs: Sequence[tuple[str, Pair, float]]) -> Callable[[], None]:
    total, added = summed(layer.weight.data, pairs)
    new = {"weight": total}
    if added is not None:
        new["bias"] = layer.bias.data.float() + added
    return _hold(layer, new)


def _hold(layer: Any, values: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Give parameters other values; the undo gives them the very tensors they had."""
    before = {name: getattr(layer, name).data for name in values}
    for name, value in values.items():
        getattr(layer, name).data = value.to(before[name].device, before[name].dtype)

    def undo() -> None:
        for name, tensor in before.items():
            now = getattr(layer, name)
            now.data = tensor.to(now.device, now.dtype)  # the model may have been moved or cast since

    return undo


def _extra_branches(layer: Any, pairs: Sequence[tuple[str, Pair, float]]) -> Callable[[], None]:
    """More rank in the branch that a 4-bit layer has anyway."""
    names = [f"lora.{name}" for name, _, _ in pairs]
    for name, (_, pair, strength) in zip(names, pairs, strict=True):
        layer.with_extra_branch(name, padded(pair.down, layer.in_features), pair.up, strength * pair.scale)

    def undo() -> None:
        for name in reversed(names):
            layer.without_extra_branch(name)

    return undo
