"""The clock of a run: `scheduler.step` and `scheduler.set_timesteps`, watched on the scheduler instance.

The step index is the count of `step` calls. It is never read from a timestep tensor (two bf16 timesteps can be
equal, and reading one synchronises a GPU) and never guessed from the parity of denoiser calls.
"""

from __future__ import annotations

import contextvars
import functools
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .compat import Argument, Forward, Output
    from .protocols import Scheduler
    from .run import Run


# The run whose model calls are being made in this thread; None between runs and inside the user's callbacks.
CURRENT: contextvars.ContextVar[Run | None] = contextvars.ContextVar("diffaccel_run", default=None)


class _Tap:
    """Stands in for a bound method of a scheduler instance while a run lasts. Keeps name and signature."""

    def __init__(self, scheduler: Scheduler, name: str, run: Run | None) -> None:
        self.scheduler, self.name, self.run = scheduler, name, run
        self.fn: Forward = getattr(type(scheduler), name).__get__(scheduler)
        functools.update_wrapper(self, self.fn)

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Argument]) -> _Tap:
        # A pipeline may copy its scheduler in mid-run; the copy's method must step the copy, unwatched.
        copied = memo.get(id(self.scheduler), self.scheduler)
        if self.run is not None and not self.run.ticks:
            self.run.copies += 1
        return type(self)(copied, self.name, None)


class _StepTap(_Tap):
    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        run = self.run
        if run is None:
            return self.fn(*args, **kwargs)
        if run.replay is not None and run.replay.pending:
            return run.replay.step(run, args, kwargs)
        sampler = run.sampler
        output = self.fn(*args, **kwargs) if sampler is None else sampler.step(run, self.fn, args, kwargs)
        run.tick(output)
        return output


class _LoopTap(_Tap):
    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        run = self.run
        if run is None:
            return self.fn(*args, **kwargs)
        run.end_loop()
        output = self.fn(*args, **kwargs)
        if run.sampler is not None:
            run.sampler.begin_loop(run)
        return output


TAPS = {"step": _StepTap, "set_timesteps": _LoopTap}


def watch(scheduler: Scheduler, run: Run) -> None:
    """Let `run` see every `step` and `set_timesteps` of this scheduler instance."""
    for name, tap in TAPS.items():
        if hasattr(type(scheduler), name):
            vars(scheduler)[name] = tap(scheduler, name, run)


def unwatch(scheduler: Scheduler) -> None:
    """Undo `watch`."""
    for name in TAPS:
        if isinstance(vars(scheduler).get(name), _Tap):
            del vars(scheduler)[name]


def schedule_of(scheduler: Scheduler | None) -> tuple[list[float], list[float]]:
    """(timesteps, sigmas) of the schedule as host numbers; sigmas empty where the scheduler has none.

    Reads device tensors: call it once, after the loop.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    sigmas = getattr(scheduler, "sigmas", None)
    return _floats(timesteps), _floats(sigmas)


def _floats(values: torch.Tensor | None) -> list[float]:
    return [] if values is None else [float(v) for v in values.flatten().tolist()]


def position(scheduler: Scheduler | None) -> int | None:
    """The absolute index in the schedule of the next step (host data only), or None."""
    index = getattr(scheduler, "step_index", None)
    if index is None:
        index = getattr(scheduler, "begin_index", None)
    return index if isinstance(index, int) else None


def euler_lengths(scheduler: Scheduler | None, sigmas: list[float]) -> list[float] | None:
    """The lengths of the steps, for a scheduler that adds length x (the denoiser's output); None for any other."""
    config = getattr(scheduler, "config", {})
    name = type(scheduler).__name__
    flow = name == "FlowMatchEulerDiscreteScheduler" and not config.get("stochastic_sampling", False)
    noise = name == "EulerDiscreteScheduler" and config.get("prediction_type") == "epsilon"
    if not (flow or noise) or len(sigmas) < 2:
        return None
    return [after - before for before, after in pairwise(sigmas)]
