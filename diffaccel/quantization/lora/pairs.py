"""What one adapter adds to one layer, as matrices; nothing here knows files or pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
POINTWISE: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}  # dimensions of the weight


@dataclass(frozen=True, eq=False)
class Pair:
    """W -> W + scale * up @ down, and with a magnitude m (DoRA, arXiv 2402.09353, equation 5) the rows of that, each
    brought to the length m.

    Attributes:
        down: [r, in] for a linear layer, [r, in, *kernel] for a convolution; r = 0 where there is a bias alone.
        up: [out, r], or [out, r, 1, ...].
        scale: alpha / r of the file, alpha / sqrt(r) for rsLoRA (1 where the file says nothing).
        bias: [out], added to the output times scale.
        magnitude: [out].
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0
    bias: Tensor | None = None
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """r."""
        return len(self.down)

    @property
    def plain(self) -> bool:
        """Nothing but a low-rank product?"""
        return self.bias is None and self.magnitude is None

    def delta(self, strength: float, width: int | None = None) -> Tensor:
        """strength * scale * up @ down as a float32 matrix [out, in * kernel]; a narrower `down` is filled with zeros
        to `width` inputs."""
        down, up = self.down.float(), self.up.float()
        down = down if width is None else padded(down, width)
        if max(down.shape[2:], default=1) > 1:  # (by a convolution: the order of summation that peft has)
            product = POINTWISE[down.ndim](down.transpose(0, 1), up).transpose(0, 1).flatten(1)
        else:
            product = up.flatten(1) @ down.flatten(1)
        return product * (self.scale * strength)


@dataclass(frozen=True, eq=False)
class Replaced:
    """A parameter that the file brings anew (the norms of a Control LoRA); strengths do not scale it.

    Attributes:
        value: of the shape of the layer's weight.
    """

    value: Tensor

    @property
    def rank(self) -> int:
        """No matrices."""
        return 0


Weights = Mapping[str, Mapping[str, Pair | Replaced]]  # component -> path of the layer in it -> what is added


def padded(down: Tensor, width: int) -> Tensor:
    """[r, in, ...] -> [r, width, ...], zeros behind."""
    if down.shape[1] >= width:
        return down
    return torch.cat((down, down.new_zeros(down.shape[0], width - down.shape[1], *down.shape[2:])), 1)


def kronecker(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """LoKr, w1 (x) w2, exactly as a low-rank pair.

    Args:
        parts: "w1" [a, b] or its factors "w1_a" [a, r], "w1_b" [r, b]; "w2" [c, d] or "w2_a" [c, r], "w2_b" [r, d].

    Returns:
        (down [R, b * d], up [a * c, R]) with R = b * r, or b * c where w2 is whole: w1 (x) (x y) is
        (w1 (x) x)(1 (x) y).
    """
    first = parts["w1"] if "w1" in parts else parts["w1_a"] @ parts["w1_b"]
    if "w2" in parts:
        left, right = torch.eye(parts["w2"].shape[0], dtype=parts["w2"].dtype), parts["w2"]
    else:
        left, right = parts["w2_a"], parts["w2_b"]
    same = torch.eye(first.shape[1], dtype=right.dtype)
    return torch.kron(same, right.contiguous()), torch.kron(first.contiguous(), left.contiguous())


def is_linear(layer: object) -> bool:
    """Does it multiply with a matrix [out, in]? Layers of other libraries do, and need not be an nn.Linear."""
    if isinstance(layer, torch.nn.Linear):
        return True
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return isinstance(layer, torch.nn.Module) and all(isinstance(size, int) for size in sizes)


def unfit(layer: torch.nn.Module | None, pair: Pair, widens: bool = False) -> str | None:
    """Why a pair does not fit a layer, or None. With `widens`, a linear layer may have more inputs or fewer."""
    if layer is None:
        return "no such layer"
    r = pair.rank
    wanted: tuple[tuple[int, ...], tuple[int, ...]]
    if is_linear(layer):
        features: Any = layer
        width = pair.down.shape[1] if widens and pair.down.ndim == 2 else features.in_features
        wanted, outputs = ((r, width), (features.out_features, r)), features.out_features
    elif isinstance(layer, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        if layer.groups != 1:
            return "it is a grouped convolution, which takes no LoRA here"
        ones = (1,) * len(layer.kernel_size)
        wanted = (r, layer.in_channels, *layer.kernel_size), (layer.out_channels, r, *ones)
        outputs = layer.out_channels
    else:
        return f"it is a {type(layer).__name__}, no linear layer or convolution"
    given = tuple(pair.down.shape), tuple(pair.up.shape)
    if given != wanted:
        return f"shapes {given[0]} and {given[1]}, the layer takes {wanted[0]} and {wanted[1]}"
    for name, vector in (("bias", pair.bias), ("magnitude", pair.magnitude)):
        if vector is not None and vector.shape != (outputs,):
            return f"its {name} has {vector.numel()} values, the layer {outputs} outputs"
    tensors = (pair.down, pair.up, pair.bias, pair.magnitude)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None):
        return "it holds numbers that are not finite"
    return None
