"""Does a quantized model still give numbers, and the right colours? Checked on the first call of a run; a failure
names the layer.

Only the output of the denoiser is looked at (one host sync per run); layers are looked at, by running the call again
without compiled code, where something is wrong, or where a comparison with the original weights was asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..core.compat import leaves
from ..core.listener import Listener
from ..core.run import Call, Run, suspended
from ..core.state import PerRun
from ..errors import DiffaccelError

FINITE, REFERENCE, OFF = "finite", "reference", "off"
MODES = (FINITE, REFERENCE, OFF)
LARGEST_SHIFT = 0.1  # of a channel's standard deviation


def finite(output: Any) -> bool:
    """Are all floating-point tensors of a model's output finite? (One host sync.)"""
    flags = [torch.isfinite(t).all() for t in leaves(output)[0] if t.is_floating_point()]
    return bool(torch.stack(flags).all()) if flags else True


def channel_shift(reference: torch.Tensor, candidate: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """|difference of a channel's means| in units of its standard deviation in the reference: [C]."""
    truth = reference.float().movedim(axis, -1).flatten(0, -2)  # [N, C]
    given = candidate.float().movedim(axis, -1).flatten(0, -2)
    spread = truth.std(dim=0, correction=0).clamp(min=1e-6)
    return (given.mean(dim=0) - truth.mean(dim=0)).abs() / spread


@dataclass(frozen=True)
class LayerReport:
    """One layer's output, quantized against original, for the same input."""

    name: str
    error: float
    shift: float  # the largest `channel_shift`


class Watch(Listener):
    """Looks at the first call of each denoiser in one run. Lives in the root hook's list of listeners for that run."""

    def __init__(
        self, lever: str, run: Run, module: nn.Module, layers: Mapping[str, nn.Module], plain: Plain | None
    ) -> None:
        self.lever, self.run, self.module, self.layers, self.plain = lever, run, module, layers, plain
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.done = False

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember what goes in."""
        if not self.done:
            self.inputs = (args, kwargs)

    def end_call(self, call: Call) -> None:
        """Judge what came out."""
        if self.done or call.output is None or self.inputs is None:
            return
        self.done, (args, kwargs), self.inputs = True, self.inputs, None
        if not finite(call.output):
            raise DiffaccelError(f"{self.lever}: {self._blame(args, kwargs)}")
        if self.plain is not None:
            self._compare(call.output, args, kwargs)

    def _blame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if not finite((args, kwargs)):
            return (
                f"{type(self.module).__name__} was called with values that are not finite: what comes before it makes "
                "them, not the quantized weights"
            )
        name = first_not_finite(self.layers, lambda: run_plainly(self.module, args, kwargs))
        if name is None:
            return (
                f"the output of {type(self.module).__name__} is not finite, but no quantized layer made it so: check "
                "the model's dtype"
            )
        return (
            f"the output of layer {name} is not finite. Keep it in high precision "
            f"(keep=({name!r},)), or take the quantization off"
        )

    def _compare(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.plain is not None
        with self.plain():
            truth, layers = compare_layers(self.layers, lambda: run_plainly(self.module, args, kwargs), self.plain)
        shifts = [
            float(channel_shift(a, b, 1 if a.dim() > 3 else -1).max())
            for a, b in zip(leaves(truth)[0], leaves(output)[0], strict=True)
            if a.is_floating_point() and a.dim() > 1
        ]
        worst = max(layers, key=lambda report: report.error, default=None)
        if worst is None or not shifts:
            return
        self.run.state[self.lever] = PerRun(channel_shift=max(shifts), worst_layer=worst.name, worst_error=worst.error)
        if max(shifts) > LARGEST_SHIFT:
            self.run.note(
                f"{self.lever}: a channel of the denoiser's output moved by {max(shifts):.2f} of its spread against "
                f"the original weights (colours may shift); largest layer error {worst.error:.3f} in {worst.name}"
            )


class Plain:
    """A context in which the layers carry their original weights; `quantized` gives a layer's other one."""

    def __init__(self, pairs: list[tuple[nn.Module, nn.Parameter, nn.Parameter]]) -> None:
        self.pairs = pairs  # (layer, quantized, original)
        self.quantized = {id(layer): quantized for layer, quantized, _ in pairs}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        for layer, quantized, original in self.pairs:
            there = original.device == quantized.device
            layer._parameters["weight"] = original if there else nn.Parameter(original.to(quantized.device), False)
        try:
            yield
        finally:
            for layer, quantized, _ in self.pairs:
                layer._parameters["weight"] = quantized


@torch.no_grad()
def run_plainly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's forward outside of the run (no cache, no other lever on calls) and of compiled code."""
    with suspended(), torch.compiler.set_stance("force_eager"):
        return module(*args, **kwargs)


def first_not_finite(layers: Mapping[str, nn.Module], forward: Callable[[], Any]) -> str | None:
    """The first layer, in order of execution, that makes something not finite of finite input."""
    found: list[str] = []

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not found and finite(args) and not finite(output):
                found.append(name)

        return hook

    with _hooked(layers, hook_of):
        forward()
    return found[0] if found else None


def compare_layers(
    layers: Mapping[str, nn.Module], forward: Callable[[], Any], plain: Plain
) -> tuple[Any, list[LayerReport]]:
    """(output, a report per layer) of a forward with the original weights; each layer is also run quantized."""
    measured: dict[str, torch.Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            if isinstance(layer, nn.Linear):
                given = functional.linear(args[0], plain.quantized[id(layer)], layer.bias)
                error = (given.float() - output.float()).norm() / output.float().norm().clamp(min=1e-12)
                measured[name] = torch.stack([error, channel_shift(output, given).max()])

        return hook

    with _hooked(layers, hook_of):
        output = forward()
    values = torch.stack(list(measured.values())).tolist() if measured else []
    return output, [LayerReport(name, *pair) for name, pair in zip(measured, values, strict=True)]


@contextlib.contextmanager
def _hooked(layers: Mapping[str, nn.Module], hook_of: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook_of(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
