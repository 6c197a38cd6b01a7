"""Run ⊃ Loop ⊃ Step ⊃ Call: which run, expert, step, sigma, guidance branch and stage am I in?

A run is one pipeline call (or an explicit `with pipe.acceleration.run():` around a hand-written loop). It owns
all per-run state of all accelerators, so that nothing outlives it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from .clock import CURRENT, position, schedule_of, unwatch, watch
from .compat import num_timesteps
from .modular import watched
from .report import RunReport, StepRecord
from .state import PerRun
from .timing import Stopwatch

if TYPE_CHECKING:
    from .compat import Args, Forward, Kwargs, Output
    from .listener import Sampler
    from .observer import Observer
    from .protocols import Owner, Pipeline, ProgressBar, Scheduler
    from .snapshot import Replay
    from .timing import Mark

    Request = tuple[tuple[Forward, Pipeline], Args, Kwargs]


ASIDE = "aside"  # name of a call that no guider asked for, in a loop that they lead


def current_run() -> Run | None:
    """The innermost run of this thread, or None."""
    return CURRENT.get()


class Call:
    """One forward of a denoiser within a run.

    A listener of the root hook may set, in its `begin_call`: `answer` (returned instead of running the denoiser),
    `inputs` ((args, kwargs) in place of the caller's; later listeners see these) and `finish` (called with the
    output, returns what the caller gets). In `end_call` it finds the `output` before `finish` (None where the call
    raised). All four live for the length of the call. A listener that finds an `answer` keeps out of the call.
    It may give the call another `branch` (half of a batch); `name` stays the pipeline's.
    """

    __slots__ = (
        "answer", "branch", "by", "component", "computed", "end", "error", "finish", "gate", "inputs", "loop", "name",
        "output", "replay", "run", "start", "step",
    )  # fmt: skip

    def __init__(self, run: Run, component: str, branch: str, start: Mark) -> None:
        self.run, self.component, self.branch, self.start, self.end = run, component, branch, start, start
        self.name = branch
        self.step, self.loop = run.step, run.loop
        self.computed: bool = True
        self.gate: float | None = None
        self.by = ""  # the plan item that answered, where `computed` is False
        self.error: torch.Tensor | None = None  # what a forecast would have missed at this computed call, [B]
        self.replay: Output = None  # an output to return instead of computing, while a paused run is replayed
        self.answer: Output = None
        self.inputs: tuple[Args, Kwargs] | None = None
        self.finish: Callable[[Output], Output] | None = None
        self.output: Output = None


class Run:
    """State of one run. `total` is the number of steps of the current loop (None until known)."""

    def __init__(self, pipe: Pipeline, branch_names: Callable[[Pipeline, int], str], owner: Owner) -> None:
        self.pipe, self.owner, self.branch_names = pipe, owner, branch_names
        self.scheduler: Scheduler | None = getattr(pipe, "scheduler", None)
        self.thread = threading.get_ident()
        self.step = 0
        self.loop = 0
        self.ticks = 0
        self.total: int | None = None
        self.calls: list[Call] = []
        self.seen: dict[tuple[str, str], int] = {}
        self.calls_in_step = 0
        self.state: dict[str, PerRun] = {}  # what each lever keeps for this run, by its name
        self.sampler: Sampler | None = None  # who stands around the scheduler's steps
        self.notes: list[str] = []
        self.bar: ProgressBar | None = None
        self.observer: Observer | None = None
        self.replay: Replay | None = None
        self.request: Request | None = None  # of a pipeline call
        self.rng_start: list[tuple[torch.Generator | None, torch.Tensor]] = []
        self.outputs: dict[tuple[str, str], Output] = {}
        self.step_output: Output = None
        self.bytes_peak = 0
        self.bytes_held: dict[str, int] = {}
        self.hits = 0
        self.condition: str | None = None  # of the call to come, where a guider says so (modular pipelines)
        self.conditions: dict[int, list[str]] = {}  # of this step, by guider
        self.copies = 0  # how often the pipeline copied its scheduler before the first step, for a stream of its own
        self.guided = False  # do guiders hand out the conditions of each step?
        self.edits = 0  # how often a callback of the user's exchanged what the pipeline is conditioned on
        self._begins: dict[int, int] = {}  # per loop: where in the scheduler's own table it began
        self._schedules: dict[int, tuple[list[float], list[float]]] = {}
        self._tables: dict[int, tuple[list[float], list[float]]] = {}
        self.device = torch.device(getattr(pipe, "_execution_device", None) or "cpu")
        self.watch = Stopwatch(self.device)
        self.mark = self.watch.mark
        self.started = self.mark()
        self.first_call: Mark | None = None
        self.last_step: Mark | None = None

    # ---- events, in the order in which they come -------------------------------------------------------

    def end_loop(self) -> None:
        """`set_timesteps` is about to be called: whatever ran so far was a loop of its own."""
        if self.calls and self.calls[-1].loop == self.loop:
            self._schedules[self.loop] = schedule_of(self.scheduler)
            self.loop += 1
        self.step, self.total, self.calls_in_step = 0, None, 0
        self.seen.clear()
        self.conditions.clear()

    def begin_call(self, component: str, context: str | None) -> Call:
        """A denoiser forward starts; `context` is the pipeline's own name for the branch, if it gave one."""
        start = self.mark()
        if self.first_call is None:
            self.first_call = start
        if self.total is None:
            self._learn_loop()
        aside = self.guided and not self.conditions  # a reference that is read once, before the step's own calls
        branch = context or self.condition or (ASIDE if aside else self.branch_names(self.pipe, self.calls_in_step))
        key = (component, branch)
        seen = self.seen.get(key, 0)
        self.seen[key] = seen + 1
        self.calls_in_step += 1
        if seen:  # a second call of one branch without a scheduler step between: a branch of its own
            branch = f"{branch}#{seen + 1}"
        call = Call(self, component, branch, start)
        if self.replay is not None and self.replay.pending:
            call.replay = self.replay.output(component, branch)
        self.calls.append(call)
        return call

    def end_call(self, call: Call, output: Output) -> None:
        """The forward returned."""
        call.end = self.mark()
        if not call.computed:
            self.hits += 1
        self.outputs[(call.component, call.branch)] = output

    def tick(self, output: Output) -> None:
        """`scheduler.step` returned: the step is over."""
        self.step += 1
        self.ticks += 1
        self.calls_in_step = 0
        self.seen.clear()
        self.conditions.clear()
        self.step_output = output
        self.last_step = self.mark()
        if self.bar is not None and self.hits:
            self.bar.set_postfix_str(f"cached {self.hits}/{len(self.calls)}", refresh=False)
        if self.observer is not None:
            self.observer.end_step(self)

    # ---- what accelerators ask -------------------------------------------------------------------------

    def _learn_loop(self) -> None:
        """Number of steps and place in the schedule of the loop that begins (host data; no tensor is read)."""
        begin = position(self.scheduler)
        self._begins.setdefault(self.loop, 0 if begin is None else begin - self.step)
        announced = num_timesteps(self.pipe)
        timesteps = getattr(self.scheduler, "timesteps", None)
        scheduled = len(timesteps) if timesteps is not None else None
        if announced is not None and (scheduled is None or announced <= scheduled):
            self.total = announced
        elif scheduled is not None:
            self.total = scheduled - self._begins[self.loop]

    @property
    def begin(self) -> int:
        """Where in the scheduler's table this loop began (0 unless it started late, as image-to-image does)."""
        return self._begins.get(self.loop, 0)

    def schedule(self) -> tuple[list[float], list[float]]:
        """(timesteps, noise levels) of this loop's steps as host numbers, read once per loop; empty where unknown."""
        found = self._tables.get(self.loop)
        if found is None:
            timesteps, sigmas = schedule_of(self.scheduler)
            found = self._tables[self.loop] = timesteps[self.begin :], sigmas[self.begin :]
        return found

    def hold(self, name: str, count_bytes: int) -> None:
        """An accelerator now holds so many bytes for this run."""
        self.bytes_held[name] = count_bytes
        self.bytes_peak = max(self.bytes_peak, sum(self.bytes_held.values()))

    def was_interrupted(self) -> bool:
        """Was it stopped by `pipe._interrupt = True`, as diffusers documents it, before its last step? Says so."""
        stopped = bool(getattr(self.pipe, "_interrupt", False)) and (self.total is None or self.step < self.total)
        if stopped:
            of = "" if self.total is None else f" of {self.total}"
            self.note(f"stopped by pipe._interrupt after {self.step}{of} steps")
        return stopped

    def note(self, text: str) -> None:
        """A remark for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    # ---- the end ---------------------------------------------------------------------------------------

    def report(self, completed: bool, bytes_held: int, stats: dict[str, dict[str, object]]) -> RunReport:
        """Read the marks and build the report."""
        end = self.mark()
        self.watch.finish()
        if self.calls and self.scheduler is not None:
            self._schedules[self.loop] = schedule_of(self.scheduler)
        if self.calls and not self.ticks:
            self.note("no scheduler step was seen in this run: step caches stood down")
        seconds = self.watch.seconds
        stages = {
            "encode": seconds(self.started, self.first_call or end),
            "denoise": seconds(self.first_call, self.last_step or (end if self.first_call else None)),
            "decode": seconds(self.last_step, end) if self.last_step else 0.0,
        }
        return RunReport(
            steps=[self._record(call) for call in self.calls if call.replay is None],
            stages=stages,
            peak_memory_bytes=self.watch.peak_memory_bytes(),
            cache_bytes_held=bytes_held,
            cache_bytes_peak=self.bytes_peak,
            notes=list(self.notes),
            stats=stats,
            completed=completed,
        )

    def _record(self, call: Call) -> StepRecord:
        timesteps, sigmas = self._schedules.get(call.loop, ([], []))
        at = call.step + self._begins.get(call.loop, 0)

        def pick(values: list[float]) -> float | None:
            return values[at] if at < len(values) else None

        return StepRecord(
            index=call.step,
            timestep=pick(timesteps),
            sigma=pick(sigmas),
            branch=call.branch,
            computed=call.computed,
            gate=call.gate,
            seconds=self.watch.seconds(call.start, call.end),
            component=call.component,
            forecast_error=None if call.error is None else tuple(call.error.tolist()),
        )


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """No run is current inside: for the user's own code (callbacks), whose model calls are not the run's."""
    token = CURRENT.set(None)
    try:
        yield
    finally:
        CURRENT.reset(token)


class running:
    """Make a run current in this thread and watch its scheduler (and guiders); on exit, put all back."""

    def __init__(self, run: Run) -> None:
        self.run, self.more = run, watched(run)

    def __enter__(self) -> Run:
        self.token = CURRENT.set(self.run)
        if self.run.scheduler is not None:
            watch(self.run.scheduler, self.run)
        self.more.__enter__()
        return self.run

    def __exit__(self, *exc: object) -> None:
        CURRENT.reset(self.token)
        self.more.__exit__(None, None, None)
        if self.run.scheduler is not None:
            unwatch(self.run.scheduler)
