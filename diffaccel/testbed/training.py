"""Small shared parts of the two trainings: a wall-clock schedule, an average of weights, safe checkpoints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Clock:
    """Wall time spent on one training against its budget, over any number of resumptions."""

    def __init__(self, budget_s: float, elapsed_s: float = 0.0) -> None:
        self.budget_s = budget_s
        self._before_s = elapsed_s
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds spent so far, those before a resumption included."""
        return self._before_s + time.monotonic() - self._start

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent, at most 1."""
        return min(1.0, self.elapsed_s / max(self.budget_s, 1e-9))


def learning_rate(peak: float, step: int, fraction: float, warmup_steps: int, hold: float = 0.4) -> float:
    """Linear warm-up in steps, level until `hold` of the time is spent, then linearly to zero at the end."""
    rise = min(1.0, (step + 1) / warmup_steps)
    return peak * rise * min(1.0, max(0.0, (1.0 - fraction) / (1.0 - hold)))


class Average:
    """Exponential moving average of parameters; young averages forget faster."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], decay: float) -> None:
        self._live = list(parameters)
        self._decay = decay
        self.steps = 0
        self.values = [parameter.detach().clone() for parameter in self._live]

    def update(self) -> None:
        """Take in the parameters as they are now, after one more step."""
        import torch

        self.steps += 1
        decay = min(self._decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.values, [parameter.detach() for parameter in self._live], 1.0 - decay)

    def swap(self) -> None:
        """Exchange live and averaged values (call twice to come back)."""
        for parameter, value in zip(self._live, self.values, strict=True):
            kept = parameter.data.clone()
            parameter.data.copy_(value)
            value.copy_(kept)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; `load` takes it back."""
        return {"steps": self.steps, "values": self.values}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.steps = state["steps"]
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


def split_gradients(
    losses: Sequence[Callable[[], torch.Tensor]],
    parameters: list[torch.nn.Parameter],
    workers: ThreadPoolExecutor,
) -> float:
    """Set every `.grad` to the mean over `losses`, each in a thread of its own; returns the mean loss.

    Batch parts in threads of one core each need no barrier within an operation, so other work on the machine
    slows them in proportion only.
    """
    import torch

    def one(loss_of: Callable[[], torch.Tensor]) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = loss_of()
        return loss.item(), torch.autograd.grad(loss, parameters, materialize_grads=True)

    results = list(workers.map(one, losses))
    total = list(results[0][1])
    for _, gradients in results[1:]:
        torch._foreach_add_(total, gradients)
    torch._foreach_div_(total, len(results))
    for parameter, gradient in zip(parameters, total, strict=True):
        parameter.grad = gradient
    return sum(loss for loss, _ in results) / len(results)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write next to the target and rename, so that an interruption leaves the previous checkpoint whole."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What `save_checkpoint` wrote."""
    import torch

    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def say(text: str) -> None:
    """One line of progress on stderr."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
