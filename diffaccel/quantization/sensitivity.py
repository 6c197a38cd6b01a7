"""How much each layer's output suffers from a scheme, and which layers to keep within a budget of bytes or error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from ..errors import BudgetError, InvalidOptionError
from .policy import Policy, Selection
from .weights import tensor_bytes

Convert = Callable[[torch.Tensor], torch.Tensor]  # a weight -> the quantized weight


@dataclass(frozen=True)
class LayerCost:
    """One layer: bytes of its weight as it is and quantized, and the relative error of its output when quantized."""

    name: str
    plain_bytes: int
    quantized_bytes: int
    error: float


def output_error(weight: torch.Tensor, quantized: torch.Tensor, inputs: torch.Tensor) -> float:
    """||x Q^T - x W^T|| / ||x W^T|| of a Linear for inputs x [..., K]; 0 where the true output is all zero."""
    truth = functional.linear(inputs.float(), weight.detach().float())
    given = functional.linear(inputs, quantized).float()
    size = truth.norm()
    return float((given - truth).norm() / size) if size > 0 else float(given.norm() > 0)


@torch.no_grad()
def capture(
    layers: Mapping[str, nn.Module], forward: Callable[[], object], rows: int = 256
) -> dict[str, torch.Tensor]:
    """Inputs of every layer while `forward()` runs: {name: [at most rows, K]}, evenly taken from its first call."""
    seen: dict[str, torch.Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if name not in seen:
                flat = args[0].detach().reshape(-1, args[0].shape[-1])
                seen[name] = flat[:: max(1, -(-flat.shape[0] // rows))].clone()

        return hook

    handles = [layer.register_forward_pre_hook(hook_of(name)) for name, layer in layers.items()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return seen


@torch.no_grad()
def measure(
    module: nn.Module, names: Sequence[str], convert: Convert, forward: Callable[[], object], rows: int = 256
) -> tuple[LayerCost, ...]:
    """The cost of each named Linear of `module` under a scheme.

    Args:
        module: the denoiser, unquantized.
        names: its layers, e.g. `Selection.quantized`.
        convert: a weight -> its quantized form (usable in F.linear).
        forward: runs the calibration (a pipeline call, a denoiser call).
        rows: tokens kept per layer.

    Layers that the calibration never ran are left out.
    """
    layers = {name: module.get_submodule(name) for name in names}
    costs = []
    for name, inputs in capture(layers, forward, rows).items():
        weight: torch.Tensor = layers[name].weight  # type: ignore[assignment]
        quantized = convert(weight)
        error = output_error(weight, quantized, inputs)
        costs.append(LayerCost(name, tensor_bytes(weight), tensor_bytes(quantized), error))
    return tuple(costs)


def keep_within(
    costs: Sequence[LayerCost], *, max_bytes: int | None = None, max_error: float | None = None
) -> tuple[str, ...]:
    """Which layers to keep in high precision, worst error per byte first.

    Args:
        max_bytes: bytes that all these weights together may take; within them as many layers are kept as fit.
        max_error: root mean square of the layers' relative errors (a kept one has 0) that is allowed; without
            `max_bytes` no more are kept than this needs.

    Raises:
        InvalidOptionError: neither bound given.
        BudgetError: even with everything quantized there are too many bytes, or the error asked for needs more.
    """
    if max_bytes is None and max_error is None:
        raise InvalidOptionError("keep_within: give max_bytes, max_error, or both")
    spent = sum(cost.quantized_bytes for cost in costs)
    if max_bytes is not None and spent > max_bytes:
        raise BudgetError(f"max_bytes={max_bytes}: all {len(costs)} layers quantized still take {spent} bytes")
    kept: list[str] = []
    for cost in sorted(costs, key=lambda c: -(c.error**2) / max(1, c.plain_bytes - c.quantized_bytes)):
        if max_error is not None and _mean_error(costs, kept) <= max_error:
            return tuple(kept)
        more = cost.plain_bytes - cost.quantized_bytes
        if max_bytes is None or spent + more <= max_bytes:
            kept.append(cost.name)
            spent += more
    if max_error is not None and _mean_error(costs, kept) > max_error:
        raise BudgetError(
            f"max_error={max_error:g} with max_bytes={max_bytes}: with {len(kept)} layers kept the error is still "
            f"{_mean_error(costs, kept):.3g}"
        )
    return tuple(kept)


def _mean_error(costs: Sequence[LayerCost], kept: Sequence[str]) -> float:
    """Root mean square of the relative errors, with 0 for the layers kept."""
    gone = set(kept)
    return float((sum(c.error**2 for c in costs if c.name not in gone) / max(1, len(costs))) ** 0.5)


def keeping(policy: Policy, names: Sequence[str]) -> Policy:
    """The policy that keeps these layers too."""
    return replace(policy, keep=(*policy.keep, *(f"^{name.replace('.', chr(92) + '.')}$" for name in names)))


def table(costs: Sequence[LayerCost], selection: Selection | None = None) -> str:
    """The costs as text, worst first; with the selection, what was kept and why below."""
    lines = [f"{cost.error:8.4f}  {cost.plain_bytes:>12} -> {cost.quantized_bytes:>12}  {cost.name}" for cost in costs]
    lines = sorted(lines, reverse=True)
    return "\n".join(lines if selection is None else [*lines, str(selection)])
