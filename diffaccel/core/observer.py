"""Who watches runs: progress, profiler ranges. Nothing is called where nobody does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Call, Run


class Observer:
    """Told of a run's events in their order. Subclass it, and write what differs from doing nothing.

    It reads only; what it raises ends the run.
    """

    def begin_run(self, run: Run) -> None:
        """The pipeline is about to be called; every lever has seen the beginning."""

    def begin_call(self, call: Call) -> None:
        """A denoiser call begins."""

    def end_call(self, call: Call) -> None:
        """It returned; `call.computed` and `call.by` say who answered. Not told where it raised."""

    def end_step(self, run: Run) -> None:
        """`scheduler.step` returned; `run.step` steps are done."""

    def end_run(self, run: Run) -> None:
        """The call is over, or raised."""


class Progress:
    """Where a run stands, after a step.

    Attributes:
        step, total: steps done of this loop, and of how many (None where unknown).
        loop: which denoising loop of the run, from 0.
        computed: was any denoiser call of this step computed? `by`: the plan items that answered the others.
        reused, calls: denoiser calls of the run so far that were answered by a lever, and all of them.
        seconds: on the host's clock since the run began. On a GPU steps are queued: the host may be ahead.
        seconds_left: until the loop's last step, at the pace of its steps after the first; None before the second.
    """

    __slots__ = ("_run", "by", "calls", "computed", "loop", "reused", "seconds", "seconds_left", "step", "total")

    def __init__(self, run: Run, began: float, first: float | None, first_step: int) -> None:
        now, self._run = time.perf_counter(), run
        self.step, self.total, self.loop, self.reused = run.step, run.total, run.loop, run.hits
        self.calls, self.computed = len(run.calls), False
        by: list[str] = []
        at = run.step - 1
        for call in reversed(run.calls):
            if call.step != at or call.loop != run.loop:
                break
            if call.computed:
                self.computed = True
            elif call.by not in by:
                by.append(call.by)
        self.by, self.seconds, self.seconds_left = tuple(by), now - began, None
        if first is not None and run.total is not None and run.step > first_step:
            self.seconds_left = (now - first) / (run.step - first_step) * (run.total - run.step)

    @property
    def forecast_error(self) -> float | None:
        """What tells of fidelity while a run lasts: the largest relative error that a reuse would have made at a
        computed step so far (mean absolute error, of the worst sample). None where no cache compared. Waits for a GPU,
        as it reads tensors."""
        errors = [call.error for call in self._run.calls if call.error is not None]
        return max((float(error.max()) for error in errors), default=None)

    def __repr__(self) -> str:
        left = "?" if self.seconds_left is None else f"{self.seconds_left:.1f} s"
        return f"<Progress {self.step}/{self.total}, {self.reused} of {self.calls} calls reused, {left} left>"


class ProgressObserver(Observer):
    """Calls `callback(progress)` after every step."""

    def __init__(self, callback: Callable[[Progress], object]) -> None:
        self.callback = callback
        self.began: dict[int, tuple[float, int, float | None, int]] = {}  # by run: start, loop, first step's end, step

    def begin_run(self, run: Run) -> None:
        """The clock starts."""
        self.began[id(run)] = (time.perf_counter(), -1, None, 0)

    def end_step(self, run: Run) -> None:
        """Tell the user."""
        if run.replay is not None and run.replay.covers(run):
            return  # a step that was done before the pause
        start, loop, first, step = self.began[id(run)]
        if loop != run.loop:
            self.began[id(run)] = (start, run.loop, time.perf_counter(), run.step)
            first = None
        self.callback(Progress(run, start, first, step))

    def end_run(self, run: Run) -> None:
        """Forget the run."""
        self.began.pop(id(run), None)


class Several(Observer):
    """Several observers as one."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self.observers = observers

    def begin_run(self, run: Run) -> None:
        """All, in order."""
        for observer in self.observers:
            observer.begin_run(run)

    def begin_call(self, call: Call) -> None:
        """All, in order."""
        for observer in self.observers:
            observer.begin_call(call)

    def end_call(self, call: Call) -> None:
        """All, in reverse."""
        for observer in reversed(self.observers):
            observer.end_call(call)

    def end_step(self, run: Run) -> None:
        """All, in order."""
        for observer in self.observers:
            observer.end_step(run)

    def end_run(self, run: Run) -> None:
        """All, in reverse."""
        for observer in reversed(self.observers):
            observer.end_run(run)
