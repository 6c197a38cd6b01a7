"""Going back to where the last computed step left the sampler, and through the skipped steps once more.

A skipped step took a forecast. Once the next output is known, the outputs between can be interpolated, and the
scheduler's own `step` leads from the old state through them to where the run should stand. No model is called; it is
right for every scheduler that is a function of its state, the sample and the output (DDIM, UniPC, DPM++ 2M), and for
Euler it is what `extrapolation.correction` adds to the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..core.sampling import argument, changed, put_state, sample_of, state_of

if TYPE_CHECKING:
    from ..core.protocols import Scheduler
    from ..core.sampling import StepCall


@dataclass(frozen=True, slots=True)
class Skipped:
    """One step that was taken with a forecast.

    Attributes:
        index: the step's number in the loop.
        call: the arguments of `scheduler.step`, with the forecast as output.
        edit: what others added to its latents before the next step (a callback, an inpainting blend); None: nothing.
    """

    index: int
    call: StepCall
    edit: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Trail:
    """The steps skipped since a computed one, and where the first of them began. Values are never written into.

    Attributes:
        state: of the scheduler, before the first of them.
        steps: oldest first.
        left: the latents that the last of them returned, and their version when they were returned.
        lost: latents were written into between steps, which a replay would lose.
    """

    state: dict[str, Any] = field(default_factory=dict)
    steps: tuple[Skipped, ...] = ()
    left: tuple[torch.Tensor, int] | None = None
    lost: bool = False

    def seen(self, sample: torch.Tensor) -> Trail:
        """The next step begins with `sample`: note what was done to the latents since the last one."""
        if self.left is None or not self.steps or self.lost:
            return self
        output, version = self.left
        if version_of(output) != version or output.shape != sample.shape:
            return replace(self, lost=True)
        if output is sample:
            return self
        last = replace(self.steps[-1], edit=sample.to(output.dtype) - output)
        return replace(self, steps=(*self.steps[:-1], last))

    def then(self, scheduler: Scheduler, index: int, call: StepCall) -> Trail:
        """With a step more, before it is taken."""
        state = self.state if self.steps else state_of(scheduler)
        return Trail(state, (*self.steps, Skipped(index, call)), lost=self.lost)

    def returned(self, output: torch.Tensor) -> Trail:
        """The last of the steps was taken and gave these latents.

        In inference mode nobody counts writes, so a copy is kept, from which they are seen as any other edit.
        """
        return replace(self, left=(output.clone() if output.is_inference() else output, version_of(output)))


def version_of(tensor: torch.Tensor) -> int:
    """Counts writes into a tensor; -1 where nobody counts (inference mode)."""
    return -1 if tensor.is_inference() else tensor._version


def replay(
    scheduler: Scheduler,
    step: Callable[..., Any],
    trail: Trail,
    outputs: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Take the skipped steps again with `outputs`, from the state before the first of them.

    `step` is the scheduler's own method. Returns the latents with which the next step begins; the scheduler is left
    in the state that belongs to them.
    """
    put_state(scheduler, trail.state)
    sample: torch.Tensor = argument(trail.steps[0].call, 2, "sample")
    for skipped, output in zip(trail.steps, outputs, strict=True):
        args, kwargs = changed(skipped.call, output, sample)
        sample = sample_of(step(*args, **kwargs))
        if skipped.edit is not None:
            sample = sample + skipped.edit
    return sample


def rows_put(scheduler: Scheduler, live: dict[str, Any], rows: slice, count: int) -> None:
    """Give a scheduler the state `live`, but for `rows` of its tensors of `count` samples, which stay as they are."""
    replayed = state_of(scheduler)
    put_state(scheduler, {key: _mixed(value, replayed.get(key), rows, count) for key, value in live.items()})


def _mixed(live: Any, other: Any, rows: slice, count: int) -> Any:
    if isinstance(live, list) and isinstance(other, list) and len(live) == len(other):
        return [_mixed(a, b, rows, count) for a, b in zip(live, other, strict=True)]
    batch = isinstance(live, torch.Tensor) and live.ndim > 1 and len(live) == count
    if not batch or not isinstance(other, torch.Tensor) or other.shape != live.shape or other is live:
        return live
    mixed = live.clone()
    mixed[rows] = other[rows]
    return mixed
