"""The difference of the two guidance branches: when it is computed anew, and what stands for it otherwise.

Guidance mixes two outputs of the denoiser, u + s (c - u). The difference d = c - u changes slowly over the steps, so
on chosen steps the unconditional branch is not run and u := c - d', with d' the stored difference or its
extrapolation. Outside of a guidance interval u := c, which makes the mix c whatever s is. Pure: no model is known.
Sources: CFG-Cache of FasterCache (arXiv 2410.19355) for the stored difference, without its split into frequencies;
guidance interval, arXiv 2404.07724.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from ..extrapolation.forecast import Forecast, Sample

Tensors = tuple[torch.Tensor, ...]


class BranchAction(Enum):
    """What a step does about the unconditional branch."""

    BOTH = "both"  # run it, and remember the difference
    REUSE = "reuse"  # take it from the difference
    OFF = "off"  # no guidance at this step: the conditional output stands for it


@dataclass(frozen=True)
class GuidanceSteps:
    """The steps of one loop. `sigmas` are their noise levels, empty where no bound asks for them.

    The other attributes are those of `reuse.GuidanceReuse`, with the schedule as one flag per step.
    """

    total: int | None
    interval: int = 1
    mask: tuple[bool, ...] | None = None
    first_steps: int = 0
    last_steps: int = 0
    start: float = 0.0
    end: float = 1.0
    sigma_low: float | None = None
    sigma_high: float | None = None
    sigmas: Sequence[float] = ()

    def guided(self, step: int) -> bool:
        """Is there guidance at this step?"""
        if (self.start > 0 or self.end < 1) and self.total and not self.start <= step / self.total < self.end:
            return False
        if self.sigma_low is not None and self.sigmas[step] <= self.sigma_low:
            return False
        return self.sigma_high is None or self.sigmas[step] <= self.sigma_high

    def act(self, step: int, last: int | None) -> BranchAction:
        """What to do at `step`, where the difference was last computed at step `last` (None: not yet)."""
        if not self.guided(step):
            return BranchAction.OFF
        if last is None or step < self.first_steps:
            return BranchAction.BOTH
        if self.total is not None and step >= self.total - self.last_steps:
            return BranchAction.BOTH
        due = self.mask[step] if self.mask is not None else step - last >= self.interval
        return BranchAction.BOTH if due else BranchAction.REUSE


@dataclass(frozen=True, slots=True)
class DifferenceMemory:
    """What one denoiser remembers within a loop. Never written into: a run may be paused and copied.

    Attributes:
        loop: the loop this is about.
        like: what the denoiser was given (shapes, dtypes, device); of something else nothing is known.
        history: differences of computed steps, newest last.
        last: the step of the newest.
        done: how often each `BranchAction` was taken, over all loops of the run.
    """

    loop: int
    like: Any
    history: tuple[Sample, ...] = ()
    last: int | None = None
    done: dict[BranchAction, int] = field(default_factory=dict)

    def count(self, act: BranchAction) -> DifferenceMemory:
        """One more step that did `act`."""
        return replace(self, done=self.done | {act: self.done.get(act, 0) + 1})

    def remember(self, step: int, at: float, difference: Tensors, depth: int) -> DifferenceMemory:
        """The difference of a computed step, at coordinate `at`; the newest `depth` are kept."""
        history = (*self.history, Sample(at, difference))[-depth:]
        return replace(self, history=history, last=step).count(BranchAction.BOTH)

    def forget(self) -> DifferenceMemory:
        """Without differences."""
        return replace(self, history=(), last=None)

    def bytes(self) -> int:
        """Bytes of the stored differences."""
        return sum(t.numel() * t.element_size() for sample in self.history for t in sample.values)


def difference(cond: Sequence[torch.Tensor], uncond: Sequence[torch.Tensor]) -> Tensors:
    """c - u for every tensor of the denoiser's output, e.g. [B, C, H, W]."""
    return tuple([c - u for c, u in zip(cond, uncond, strict=True)])


def unconditional(
    cond: Sequence[torch.Tensor], memory: DifferenceMemory, act: BranchAction, forecast: Forecast, at: float
) -> Tensors:
    """What stands for the unconditional output at coordinate `at`: c - d', or c (a copy) without guidance."""
    if act is BranchAction.OFF:
        return tuple([c.clone() for c in cond])
    return tuple([c - d for c, d in zip(cond, forecast.predict(memory.history, at), strict=True)])
