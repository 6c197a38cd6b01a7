"""A scheduler's arrays of noise levels and timesteps, written in place: loops go over views of them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.sampling import FLOW, LEAST_ALPHA, prediction_of

if TYPE_CHECKING:
    from ..core.protocols import Scheduler


def resampled(levels: Sequence[float], count: int) -> list[float]:
    """`count` levels along the same curve, the first and the last of them kept; logarithms are interpolated."""
    if count == len(levels):
        return list(levels)
    found = []
    for k in range(count):
        place = k * (len(levels) - 1) / max(count - 1, 1)
        low = min(int(place), len(levels) - 2)
        ends = math.log(levels[low]), math.log(levels[low + 1])
        found.append(math.exp(ends[0] + (place - low) * (ends[1] - ends[0])))
    return found


class Arrays:
    """What a denoiser is told at a noise level, and where that is kept."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.flow = prediction_of(scheduler) == FLOW
        self.whole = not self.scheduler.timesteps.is_floating_point()
        self.train = int(scheduler.config.get("num_train_timesteps", 1000))
        self.table: list[float] = []  # log of k-diffusion's sigma at each training timestep
        alphas = getattr(scheduler, "alphas_cumprod", None)
        if not self.flow and alphas is not None:
            alphas = alphas.double().clamp(min=LEAST_ALPHA)
            self.table = (((1 - alphas) / alphas).log() / 2).tolist()

    @classmethod
    def why_never(cls, scheduler: Scheduler) -> str | None:
        """`why_not`, before any loop; None where only a loop can tell."""
        return cls(scheduler).why_not() if isinstance(getattr(scheduler, "timesteps", None), torch.Tensor) else None

    def why_not(self) -> str | None:
        """Why other levels than its own cannot be written, or None."""
        name, config = type(self.scheduler).__name__, self.scheduler.config
        if not self.flow and not self.table:
            return f"{name} does not say which timestep stands for a noise level"
        if config.get("timestep_type", "discrete") != "discrete":
            return f"{name} has timestep_type={config['timestep_type']!r}, whose timesteps are not written here"
        return None

    def time(self, at: float) -> float:
        """The timestep that stands for a noise level; a whole number where the scheduler's are."""
        if self.flow:
            time = at * self.train
        else:
            log = math.log(max(at, 1e-10))
            above = min(max(bisect.bisect_left(self.table, log), 1), len(self.table) - 1)
            low, high = self.table[above - 1], self.table[above]
            time = above - 1 + min(max((log - low) / (high - low), 0.0), 1.0)
        return float(round(time)) if self.whole else time

    def nearest(self, at: float) -> float:
        """The noise level nearest to this one that a timestep stands for exactly."""
        if not self.whole:
            return float(torch.tensor(at, dtype=torch.float32))
        time = self.time(at)
        return time / self.train if self.flow else math.exp(self.table[int(time)])

    def fill(self, levels: Sequence[float]) -> str | None:
        """Put a user's levels in the place of the scheduler's, interpolated where it has another number of steps.

        Returns what is to be said about that, or None. The logarithm of the level is interpolated, as ComfyUI's node
        for such grids does.
        """
        count = len(self.scheduler.timesteps)
        reason = self.why_not()
        if reason is not None:
            return f"its levels were not used: {reason}"
        sigmas = getattr(self.scheduler, "sigmas", None)
        last = float(sigmas[-1]) if isinstance(sigmas, torch.Tensor) else 0.0
        self.write([*map(self.nearest, resampled(levels, count)), last], 0)
        return None if len(levels) == count else f"{len(levels)} levels were interpolated to {count} steps"

    def write(self, levels: Sequence[float], start: int) -> None:
        """Put these levels, the last of which is where the loop ends, at steps `start` and after."""
        times, sigmas = self.scheduler.timesteps, getattr(self.scheduler, "sigmas", None)
        new = [self.time(at) for at in levels[: len(times) - start]]
        times[start : start + len(new)] = torch.tensor(new, dtype=times.dtype, device=times.device)
        if isinstance(sigmas, torch.Tensor) and len(sigmas) == len(times) + 1:
            sigmas[start : start + len(levels)] = torch.tensor(levels, dtype=sigmas.dtype, device=sigmas.device)
