"""What gates are shown at each step, found where a family keeps it (the places are data of the model card)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core.compat import leaves
from ..core.run import Run
from ..errors import UnsupportedModelError
from ..models.spec import ModelSpec
from .gates.base import GRID, INPUT, MODULATED, TIME, Gate


def cannot_observe(spec: ModelSpec, gate: Gate[Any]) -> str | None:
    """Why this gate cannot see what it looks at on this family, or None."""
    lacks = {
        TIME: (spec.time_embedding, "where its time embedding is made"),
        MODULATED: (spec.modulated, "how its first block modulates its input"),
    }
    if gate.observes in lacks and lacks[gate.observes][0] is None:
        return f"the card of the family {spec.family} does not say {lacks[gate.observes][1]}"
    if gate.observes == GRID and spec.layout == "tokens" and spec.grid is None:
        return f"the card of the family {spec.family} does not say how its tokens lie on a grid"
    return None


class Observer:
    """What one gate sees in one loop of one branch."""

    def __init__(self, spec: ModelSpec, module: torch.nn.Module, gate: Gate[Any]) -> None:
        self.spec, self.module, self.observes = spec, module, gate.observes
        self.projected = bool(getattr(gate, "projected", False))
        self.times: list[torch.Tensor] | None = None  # time embeddings of all steps, on the host
        self.grid: tuple[int, int, int] | None = None  # frames, rows, columns of token inputs

    def open_loop(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Once per loop: what does not depend on the step, or why it cannot be seen. The one place that waits."""
        spec = self.spec
        if self.observes == TIME:
            assert spec.time_embedding is not None
            parameter = next(self.module.parameters())
            device = run.device if parameter.device.type == "meta" else parameter.device
            timesteps = torch.tensor(run.schedule()[0][: run.total], device=device)
            made = spec.time_embedding(self.module, timesteps, self.projected)
            self.times = list(made.float().cpu())
        elif self.observes == GRID and spec.grid is not None:
            self.grid = spec.grid(args, kwargs)
            if self.grid is None:
                return "the denoiser is not told how its tokens lie on a grid"
        return None

    def at_root(self, main: Any, step: int) -> Any:
        """What a gate that is asked before the denoiser runs sees of its main input."""
        if self.observes == INPUT:
            return as_tensor(main)
        if self.observes == GRID:
            return on_grid(as_tensor(main), self.spec.layout, self.grid)
        return self.times[step] if self.times is not None else None

    def output(self, output: Any) -> torch.Tensor:
        """The denoiser's answer, shaped like its input's leading channels."""
        return batch_of(output, self.spec.layout)[0][0]


def as_tensor(main: Any) -> torch.Tensor:
    """The denoiser's main input; a list of tensors of one shape is stacked."""
    if isinstance(main, torch.Tensor):
        return main
    if len({tensor.shape for tensor in main}) != 1:
        raise UnsupportedModelError("this gate compares inputs, and the pictures of this batch differ in size")
    return torch.stack(list(main))


def batch_of(output: Any, layout: str) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """(the tensors of a denoiser's output, a function that builds such an output from other tensors).

    A list of pictures of one shape (layout "list") counts as one tensor with a row each, [B, C, F, H, W], so that
    samples are rows in every family; the function takes any number of rows.
    """
    tensors, rebuild = leaves(output)
    if layout != "list" or len({tensor.shape for tensor in tensors}) != 1:
        return tensors, rebuild
    form = _with_pictures(output, [])
    return [torch.stack(tensors)], lambda values: _with_pictures(form, list(values[0].unbind()))


def _with_pictures(output: Any, pictures: list[torch.Tensor]) -> Any:
    """An output with `pictures` in the place of its list."""
    if isinstance(output, list):
        return pictures
    if isinstance(output, Mapping):  # diffusers' output classes
        return type(output)(**{key: _with_pictures(item, pictures) for key, item in output.items()})
    return tuple([_with_pictures(item, pictures) for item in output]) if isinstance(output, tuple) else output


def leading(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
    """The leading channels (or tokens) of an input that are the latents its output is about; None where none fit."""
    if x.shape == output.shape:
        return x
    if x.ndim != output.ndim:
        return None
    for axis in range(1, x.ndim):
        if x.shape[axis] > output.shape[axis]:
            x = x.narrow(axis, 0, output.shape[axis])
    return x if x.shape == output.shape else None


def on_grid(x: torch.Tensor, layout: str, grid: tuple[int, int, int] | None) -> torch.Tensor:
    """Latents as [B, T, H, W, C]."""
    if layout == "tokens":  # [B, N, C], of which the first T*H*W are the picture's
        assert grid is not None
        frames, rows, columns = grid
        grid_of: torch.Tensor = x[:, : frames * rows * columns].unflatten(1, (frames, rows, columns))
        return grid_of
    if layout == "BCHW":
        return x.permute(0, 2, 3, 1)[:, None]
    if layout == "BFCHW":
        return x.permute(0, 1, 3, 4, 2)
    return x.permute(0, 2, 3, 4, 1)  # BCFHW, also as a stacked list
