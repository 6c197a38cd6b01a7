"""`SvdQuantLinear`: an `nn.Linear` that lost its weight and holds 4-bit codes and a low-rank branch instead.

The module object stays the one it was and only its class changes to a shared subclass, so that its place in the
model, hooks on it, and code that asks for `nn.Linear` (peft, diffusers) all go on. Its `weight` tells shape, dtype and
device and has no values: whoever would compute with it or write into it (merging a LoRA, fusing projections) gets an
error instead of an edit that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.unloaded import judged_by_shape
from ...errors import IncompatibleError, InvalidOptionError
from ..lora.layers import own_class
from .formats import GROUP, SHIFT, Codes, pack_nibbles, quantize_activation
from .math import Layer, Part, effective_weight
from .packing import unpack_codes

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
Runner = Callable[["SvdQuantLinear", Tensor], Tensor]


@dataclass(frozen=True)
class PartInfo:
    """What is not in tensors of a `math.Part`."""

    precision: str
    columns: int
    rank: int
    unsigned: bool


@dataclass
class Branch:
    """An extra low-rank branch: its rank, the strength it is applied with, down [r, in] and up [out, r]."""

    rank: int
    strength: float
    down: Tensor = field(repr=False)
    up: Tensor = field(repr=False)


class Extra(NamedTuple):
    """All extra branches side by side: down [R, in], up [out, R], scale [R]."""

    down: Tensor
    up: Tensor
    scale: Tensor


@dataclass
class State:
    """What a layer has besides tensors.

    Attributes:
        parts: its parts.
        backend: name of who computes it.
        run: (layer, input) -> output.
        presented: the dtype that the model was, or has been cast to since.
        factors: the dtype of the layer's own branch.
        branches: the extra branches.
        extra: the same side by side, on the device of the last input.
        factor: [], what one call multiplies the strengths of the extra branches with (1 between calls).
        kernel_layout: qweight lies as nunchaku's kernels read it (see `packing`).
        packed: what such a backend keeps besides, for a dtype and device.
    """

    parts: tuple[PartInfo, ...]
    backend: str
    run: Runner
    presented: torch.dtype
    factors: torch.dtype
    branches: dict[str, Branch] = field(default_factory=dict)
    extra: Extra | None = None
    factor: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float32))
    kernel_layout: bool = False
    packed: tuple[Any, list[dict[str, Tensor]]] | None = None

    @property
    def base_rank(self) -> int:
        """Rank of the layer's own branch (the parts' ranks together)."""
        return sum(part.rank for part in self.parts)


class NoWeight(torch.Tensor):
    """A tensor without values: every operation on it raises IncompatibleError."""

    @staticmethod
    def __new__(cls, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> NoWeight:
        made: NoWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=False
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise IncompatibleError(
            f"{func} on the weight of a layer that svdquant has quantized: there is none. LoRAs go beside it "
            "(with_extra_branch), not into it; disable_quantization() gives the weight back"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NoWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class SvdQuantLinear(nn.Linear):
    """y = q(x / s) q(R)^T + (x D'^T) U^T + b; made by `install`, unmade by `uninstall`.

    Buffers (of part i > 0 with the suffix `_i`): qweight [N, K'/2] uint8, wscales [N, G] (float8 as uint8), wcscales
    [N] (nvfp4), smooth_factor [K]; and for the layer: proj_down [r, in_features], proj_up [N, r], branch_scale [r].
    Casting the model does not change them.
    """

    svdq: State
    proj_down: Tensor
    proj_up: Tensor
    branch_scale: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Shape, dtype and device of the weight that is not there."""
        return NoWeight((self.out_features, self.in_features), self.svdq.presented, self.proj_up.device)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the input."""
        state: State | None = getattr(self, "svdq", None)
        if state is None:  # unmade, and somebody who came in between (a hook) goes on calling this
            output: Tensor = type(self).forward(self, input)
            return output
        return state.run(self, input)

    def tensor(self, name: str, index: int) -> Tensor:
        """A buffer of a part, by its name without suffix."""
        found = self._buffers[name + suffix(index)]
        assert found is not None, name
        return found

    def codes(self, index: int) -> Codes:
        """q(R) of a part."""
        info, end = self.svdq.parts[index], suffix(index)
        scales, packed = self.tensor("wscales", index), self.tensor("qweight", index)
        if self.svdq.kernel_layout:
            held = scales.shape[1] * GROUP[info.precision]
            packed = pack_nibbles(unpack_codes(packed)[: self.out_features, :held])
        return Codes(
            info.precision,
            packed,
            scales.view(FP8) if info.precision == "nvfp4" else scales,
            self._buffers.get("wcscales" + end),
            info.columns,
        )

    def layer(self) -> Layer:
        """The layer as the mathematics know it (without extra branches); tensors are shared."""
        parts, rank, column = [], 0, 0
        for index, info in enumerate(self.svdq.parts):
            ranks, columns = slice(rank, rank + info.rank), slice(column, column + info.columns)
            down, up = self.proj_down[ranks, columns], self.proj_up[:, ranks]
            smooth = self.tensor("smooth_factor", index)
            parts.append(Part(self.codes(index), smooth, down, up, info.unsigned))
            rank, column = ranks.stop, columns.stop
        return Layer(tuple(parts), self.bias)

    def dense_weight(self) -> Tensor:
        """[N, K] float32: what the layer multiplies with, extra branches included."""
        whole = effective_weight(self.layer())
        extra = self.extra(whole.device)
        return whole if extra is None else whole + (extra.up.float() * extra.scale) @ extra.down.float()

    @property
    def branches(self) -> Mapping[str, Branch]:
        """The extra branches by name."""
        return self.svdq.branches

    def with_extra_branch(self, name: str, down: Tensor, up: Tensor, strength: float = 1.0) -> SvdQuantLinear:
        """Add strength * up @ down to what the layer multiplies with (in place of a branch of the same name).

        The branch reads x as it is. It lies beside the layer's buffers, which stay what they are.

        Args:
            down: [r, in_features], up: [out_features, r]; kept in the dtype of the model, at least 16 bits.

        Raises:
            InvalidOptionError: the shapes do not fit.
        """
        shapes = (tuple(down.shape), tuple(up.shape))
        fits = down.ndim == up.ndim == 2 and down.shape[0] == up.shape[1] and len(down) > 0
        if not fits or down.shape[1] != self.in_features or up.shape[0] != self.out_features:
            raise InvalidOptionError(
                f"branch {name!r}: down and up are {shapes[0]} and {shapes[1]}; this layer takes (r, "
                f"{self.in_features}) and ({self.out_features}, r)"
            )
        self.without_extra_branch(name)
        wide = torch.promote_types(self.svdq.factors, self.svdq.presented)
        device = self.proj_down.device
        branch = Branch(len(down), float(strength), down.detach().to(device, wide), up.detach().to(device, wide))
        self._set_branches({**self.svdq.branches, name: branch})
        return self

    def set_branch_strength(self, name: str, strength: float) -> SvdQuantLinear:
        """Set (not add to) the strength of an extra branch."""
        if name not in self.svdq.branches:
            raise InvalidOptionError(f"no extra branch {name!r}; there are: {', '.join(self.svdq.branches) or 'none'}")
        changed = replace(self.svdq.branches[name], strength=float(strength))
        self._set_branches({**self.svdq.branches, name: changed})
        return self

    def rescale(self, value: float) -> None:
        """Multiply the strengths of all extra branches with this, in place of the factor before."""
        self.svdq.factor.fill_(value)
        self.svdq.packed = None

    def extra(self, device: torch.device) -> Extra | None:
        """The extra branches side by side, on the device of an input: down [R, in], up [out, R], and [R] of strengths
        times the factor of the call. They are no buffers: an offload of the layer leaves them alone."""
        state = self.svdq
        if state.extra is None:
            return None
        if state.extra.down.device != device:
            state.extra = Extra(*[tensor.to(device) for tensor in state.extra])
        return state.extra._replace(scale=state.extra.scale * state.factor)

    def without_extra_branch(self, name: str) -> SvdQuantLinear:
        """Take an extra branch off; what is left has the bits it had before (no such branch: nothing to do)."""
        if name in self.svdq.branches:
            self._set_branches({other: branch for other, branch in self.svdq.branches.items() if other != name})
        return self

    def _set_branches(self, branches: dict[str, Branch]) -> None:
        state, rows = self.svdq, list(branches.values())
        state.branches, state.packed, state.extra = branches, None, None
        if rows:
            strengths = [torch.full((row.rank,), row.strength, device=row.down.device) for row in rows]
            downs, ups = [row.down for row in rows], [row.up for row in rows]
            state.extra = Extra(torch.cat(downs), torch.cat(ups, 1).contiguous(), torch.cat(strengths))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """A plain weight is refused before the bias is copied (the model refuses before anything is)."""
        if prefix + "weight" in state_dict:
            raise IncompatibleError(
                f"load_state_dict: {prefix.removesuffix('.') or 'the layer'} holds 4-bit codes and takes no plain "
                "weight: call pipe.disable_quantization() first, load, and quantize again"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SvdQuantLinear:
        """Moves follow, casts do not: a scale in another dtype is another scale."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype != old.dtype:
                self.svdq.presented = new.dtype if name == "proj_up" else self.svdq.presented
                self._buffers[name] = old.to(new.device)
        return self

    def extra_repr(self) -> str:
        """As of a Linear, with the scheme."""
        first, extra = self.svdq.parts[0], "".join(f", +{n} r{b.rank}" for n, b in self.svdq.branches.items())
        return f"{super().extra_repr()}, {first.precision}, rank={first.rank}, backend={self.svdq.backend}{extra}"


def suffix(index: int) -> str:
    """End of the buffer names of a part."""
    return f"_{index}" if index else ""


@dataclass
class Installed:
    """What `uninstall` needs besides the weight itself."""

    order: tuple[str, ...]  # of the parameters
    bias: nn.Parameter | None
    buffers: dict[str, Any]


def refusal(linear: nn.Module) -> str | None:
    """Why a layer cannot be turned into an SvdQuantLinear, or None."""
    if own_class(linear) is not nn.Linear:  # a LoRA's branch goes off before weights change, and on again behind
        return f"it is a {type(linear).__name__}"
    if "forward" in vars(linear):
        return "a hook of another library holds its forward (take it off first, quantize, then put it on again)"
    if linear.weight.is_meta and not judged_by_shape():
        return "its weight is not in memory"
    if type(linear.weight) is not nn.Parameter or not linear.weight.dtype.is_floating_point:
        return f"its weight is quantized already ({type(linear.weight).__name__})"
    return None


def install(linear: nn.Linear, layer: Layer, backend: str = "torch", run: Runner | None = None) -> Installed:
    """Turn a Linear into an SvdQuantLinear, in place. `run` computes it (`run_torch` unless told).

    Raises:
        IncompatibleError: `refusal` has a reason, or the layer is of another shape.
    """
    why = refusal(linear)
    shape = (layer.out_features, layer.in_features)
    if why is None and shape != tuple(linear.weight.shape):
        why = f"the quantized layer is {shape[0]}x{shape[1]}, this one {linear.out_features}x{linear.in_features}"
    if why is not None:
        raise IncompatibleError(f"a layer cannot be quantized: {why}")
    saved = Installed(tuple(linear._parameters), linear.bias, dict(linear._buffers))
    device, dtype = linear.weight.device, linear.weight.dtype
    buffers = {name: tensor.to(device) for name, tensor in _buffers(layer).items()}
    bias = None
    if layer.bias is not None:
        bias = nn.Parameter(layer.bias.to(device=device, dtype=dtype), requires_grad=False)
    parts = tuple(PartInfo(p.codes.precision, p.codes.columns, p.rank, p.unsigned) for p in layer.parts)
    linear.__dict__["svdq"] = State(parts, backend, run or run_torch, dtype, layer.parts[0].up.dtype)
    del linear._parameters["weight"]
    linear._parameters["bias"] = bias
    linear._buffers.update(buffers)
    linear.__class__ = SvdQuantLinear
    return saved


def uninstall(linear: nn.Module, saved: Installed, weight: nn.Parameter) -> None:
    """Give a layer back what it had, on the device and in the dtype that the model has by now.

    `weight` is the original parameter, with its bits and on the right device.
    """
    if not isinstance(linear, SvdQuantLinear):
        return
    device, dtype = linear.proj_up.device, linear.svdq.presented
    before = {"weight": weight, "bias": saved.bias}
    linear._parameters.clear()
    linear._parameters.update({name: before[name] for name in saved.order})
    linear._buffers.clear()
    linear._buffers.update(saved.buffers)
    for parameter in before.values():
        if parameter is not None and (parameter.device != device or parameter.dtype != dtype):
            parameter.data = parameter.data.to(device=device, dtype=dtype)
    del linear.svdq
    linear.__class__ = nn.Linear  # type: ignore[assignment]


def _buffers(layer: Layer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    rank = sum(part.rank for part in layer.parts)
    first = layer.parts[0]
    down = first.down.new_zeros(rank, layer.in_features)
    row = column = 0
    for index, part in enumerate(layer.parts):
        end, codes = suffix(index), part.codes
        found["qweight" + end] = codes.packed
        found["wscales" + end] = codes.scales.view(torch.uint8) if codes.precision == "nvfp4" else codes.scales
        if codes.channel is not None:
            found["wcscales" + end] = codes.channel
        found["smooth_factor" + end] = part.smooth
        down[row : row + part.rank, column : column + codes.columns] = part.down
        row, column = row + part.rank, column + codes.columns
    up = torch.cat([part.up.to(first.up.dtype) for part in layer.parts], 1)
    return {**found, "proj_down": down, "proj_up": up, "branch_scale": torch.ones(rank)}


def low_rank_input(linear: SvdQuantLinear, x: Tensor) -> Tensor:
    """x D'^T of the layer's own branch, [..., r]."""
    return nn.functional.linear(x, linear.proj_down.to(x.dtype))


def with_extra(linear: SvdQuantLinear, x: Tensor, out: Tensor) -> Tensor:
    """The output [..., out_features] and what the extra branches add to it."""
    extra = linear.extra(x.device)
    if extra is None:
        return out
    low = nn.functional.linear(x, extra.down.to(x.dtype)) * extra.scale.to(x.dtype)
    return out + nn.functional.linear(low, extra.up.to(x.dtype))


def _bias(linear: SvdQuantLinear, dtype: torch.dtype) -> Tensor | None:
    return None if linear.bias is None else linear.bias.to(dtype)


def run_torch(linear: SvdQuantLinear, x: Tensor) -> Tensor:
    """Any device: activations quantized and back, weights dequantized for each call. In float32 it is the reference
    of `math.reference_forward`; it saves memory, not time."""
    out = nn.functional.linear(low_rank_input(linear, x), linear.proj_up.to(x.dtype), _bias(linear, x.dtype))
    start = 0
    for index, info in enumerate(linear.svdq.parts):
        piece = x[..., start : start + info.columns].float()
        smooth = linear.tensor("smooth_factor", index).float()
        smoothed = (piece + SHIFT if info.unsigned else piece) / smooth
        kept = quantize_activation(smoothed, info.precision, info.unsigned)
        weight = linear.codes(index).dequantize()
        out = out + nn.functional.linear(kept.to(x.dtype), weight.to(x.dtype))
        start += info.columns
    return with_extra(linear, x, out)
