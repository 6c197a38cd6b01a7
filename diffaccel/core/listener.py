"""What listens to a denoiser's calls, and what the listeners together know of the call after this one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .compat import Args, Forward, Kwargs, Output
    from .run import Call, Run


class Listener(Protocol):
    """Sees every call of one denoiser within a run. Subclass it, and write what differs from doing nothing.

    Put on with `root.add(listener, rank)`, which returns what takes it off again. Of several, the deeper rank is told
    first.

    Attributes:
        deciding: it has still to decide, inside the call in progress, whether the blocks to come are run.
        rewrites: it may give the denoiser other arguments than the pipeline's.
    """

    deciding: bool = False
    rewrites: bool = False

    def begin_call(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """The denoiser is about to run. May set `call.answer`, `call.inputs` and `call.finish`; see `Call`."""
        return

    def end_call(self, call: Call) -> None:
        """It returned or raised; told to whoever was told of the beginning."""
        return

    def will_compute(self, run: Run, step: int, component: str, branch: str) -> bool | None:
        """Will that call run the denoiser's blocks, as far as this has a say? None: only the call can tell."""
        return True


class Sampler(Protocol):
    """Stands around the scheduler's steps of one run (`Run.sampler`; one place can have it at a time)."""

    def step(self, run: Run, step: Forward, args: Args, kwargs: Kwargs) -> Output:
        """Instead of `scheduler.step(*args, **kwargs)`; `step` is the scheduler's own. It may go back and forth."""

    def begin_loop(self, run: Run) -> None:
        """`set_timesteps` returned."""
        return


def call_after(call: Call) -> tuple[int, str, str] | None:
    """(step, component, branch) of the next call of this loop, as the step before ran; None where there is none."""
    run, step = call.run, call.step
    this: list[tuple[str, str]] = []
    before: list[tuple[str, str]] = []
    for past in reversed(run.calls):
        if past.loop != call.loop or past.step < step - 1:
            break
        (this if past.step == step else before).append((past.component, past.branch))
    this.reverse()
    before.reverse()
    if len(before) > len(this):
        return (step, *before[len(this)])
    if run.total is not None and step + 1 >= run.total:
        return None
    return (step + 1, *this[0])


def next_computes(call: Call, listeners: Iterable[Listener]) -> bool:
    """Is the next call sure to run its blocks, as far as those who listen to this denoiser can say?"""
    after = call_after(call)
    return after is not None and all(listener.will_compute(call.run, *after) is True for listener in listeners)
