"""`pipe.acceleration`: the plan in force, the last report, undo, and the frame around every pipeline call."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .core import snapshot as snapshots
from .core.accelerator import PLAIN
from .core.callbacks import own_callbacks
from .core.clock import unwatch
from .core.modular import guiders, is_modular
from .core.report import RunReport
from .core.run import Run, running
from .core.snapshot import Snapshot
from .core.stack import Stack
from .core.watch import Watch
from .errors import DiffaccelError, IncompatibleError
from .models.registry import lookup
from .planner.levers import PLACES
from .planner.options import LEVEL, require_parameters, wished
from .planner.plan import Plan
from .planner.resolve import Decision, Judged, resolve
from .planner.rivals import exchanged

if TYPE_CHECKING:
    from .core.compat import Args, Forward, Kwargs, Output
    from .core.protocols import Pipeline
    from .core.run import Request
    from .planner.summary import Details
    from .quality.measurement import Measurement
    from .quantization.lora.manager import Loras

HANDLE = "_diffaccel"  # instance attribute of an accelerated pipeline


def handle_of(pipe: object) -> Acceleration | None:
    """The handle of a pipeline, or None where it is not accelerated."""
    found = getattr(pipe, "__dict__", {}).get(HANDLE)
    return found if isinstance(found, Acceleration) else None


def undress(pipe: object) -> None:
    """Give `pipe` its own class back."""
    plain = getattr(type(pipe), PLAIN, None)
    if plain is not None:
        object.__setattr__(pipe, "__class__", plain)
        vars(pipe).pop(HANDLE, None)


class Acceleration:
    """The handle of an accelerated pipeline.

    Calls of one pipeline from several threads are serialised. A call from inside another call of the same
    pipeline (in a step callback) runs on a light clone with a scheduler of its own and shared weights.
    """

    def __init__(self, pipe: Pipeline, decision: Decision) -> None:
        self._pipe = weakref.ref(pipe)
        self._decision = decision
        self.report: RunReport | None = None
        self._measurement: Measurement | None = None  # of the plan in force
        self._planned_with: object = None  # the scheduler of the pipeline when it was made
        self.retired = False  # after restore: a kept handle, or a shallow copy of the pipeline, changes nothing more
        self.lock = threading.RLock()
        self._runs: list[Run] = []  # runs in progress, outermost first; all of the thread that holds the lock
        self.stack = Stack(decision.target, self)
        self.watch = Watch(self.stack)  # who is told of runs: progress, profiler ranges

    # ---- what a user sees ------------------------------------------------------------------------------

    @property
    def pipe(self) -> Pipeline:
        """The accelerated pipeline."""
        pipe = self._pipe()
        if pipe is None:
            raise DiffaccelError("the pipeline of this handle no longer exists")
        return pipe

    @property
    def plan(self) -> Plan:
        """The plan in force; items carry what the last run measured, and who has taken their place since."""
        from .planner.in_force import in_force

        return in_force(self._decision.plan, self.report, self.stack.displaced(), self._measurement)

    @property
    def details(self) -> Details:
        """For printing: every parameter in force, prediction and measurement, one line each."""
        from .planner.pricing import priced
        from .planner.summary import Details

        def with_costs() -> Plan:
            return priced(self.plan, self._decision.target) if self.alive() else self.plan

        return Details(self.plan, self.report, with_costs)

    @property
    def wishes(self) -> dict[str, object]:
        """What was asked for: the override values behind the plan."""
        return dict(self._decision.wishes)

    @property
    def loras(self) -> Loras:
        """The LoRAs of this pipeline: `.load(source, name, strength)`, `.set({name: strength})`, `.unload(name)`."""
        from .quantization.lora.manager import Loras  # whoever has no LoRA loads no module of quantization

        return Loras(self)

    @property
    def has_loras(self) -> bool:
        """Is any LoRA of ours loaded (also one without effect)?"""
        return not self.retired and bool(self._decision.wishes.get("lora_adapters"))

    def measure(self, prompts: str | Sequence[str], *, seeds: int | Sequence[int] = 0, **call: object) -> Plan:
        """Run every prompt plain and accelerated, in turn; the plan, whose items then say what was measured: PSNR in
        dB (mean, lowest), SSIM, and speed (median over prompts of plain seconds / accelerated seconds).

        `seeds`: one per prompt, or the first one; `call`: the pipeline's own arguments. Pipeline, scheduler and random
        state are afterwards as before. Raises InvalidOptionError for bad input, before anything is run.
        """
        from .quality.measurement import measure

        self._require_life("measure")
        with self.idle("measure"):
            self._measurement = measure(self, prompts, seeds, call)
        return self.plan

    def restore(self) -> Pipeline:
        """Undo everything; returns the pipeline. See `diffaccel.restore`."""
        with self.idle("restore"):
            pipe = self.pipe
            self.stack.undo()
            self.retired = True
            undress(pipe)
        return pipe

    def snapshot(self) -> Snapshot:
        """Pause point of the run in progress (call it inside `callback_on_step_end`)."""
        if is_modular(self.pipe):
            raise IncompatibleError(
                f"snapshot(): {type(self.pipe).__name__} is a modular pipeline: nothing is called between its "
                "steps at which a run could be paused and gone on with"
            )
        run = self.run_in_progress()
        if run is None:
            raise DiffaccelError("snapshot(): no run of this pipeline is in progress in this thread")
        spec = self.stack.target.spec
        if spec.no_resume:
            raise IncompatibleError(f"snapshot(): {spec.family}: {spec.no_resume}")
        fixed = [edit.name for edit in self.stack.edits if not edit.preemptible]
        if fixed:
            raise IncompatibleError(f"snapshot(): {', '.join(fixed)} cannot be paused (preemptible=False)")
        return snapshots.take(run)

    def resume(self, state: Snapshot) -> Output:
        """Go on from a snapshot.

        Inside the very run it was taken in, puts the run's state back and returns None. Otherwise calls the
        pipeline again from the snapshot and returns what the undisturbed call would have returned.
        """
        if not isinstance(state, Snapshot) or state.run.owner is not self:
            raise DiffaccelError("resume(): the argument is not a snapshot of this accelerated pipeline")
        self._require_life("resume")
        if self.run_in_progress() is state.run:
            snapshots.put_back(state.run, state)
            return None
        if state.run.request is None:
            raise DiffaccelError("resume(): the snapshot is of a hand-written loop, which only its own code can go on")
        return self._call(*state.run.request, state)

    @contextlib.contextmanager
    def run(self, num_inference_steps: int | None = None) -> Iterator[Run]:
        """A run around a hand-written denoising loop over `pipe.transformer` and `pipe.scheduler`.

        Steps are counted from `pipe.scheduler.step`; without a scheduler call `run.tick(None)` after each step.
        """
        self._require_life("run")
        with self.lock, self._frame(self.pipe, None) as run:
            if num_inference_steps is not None:
                run.total = num_inference_steps
            yield run

    def _require_life(self, verb: str) -> None:
        if self.retired:
            raise DiffaccelError(f"{verb}(): the pipeline of this handle was restored; accelerate it again first")

    def owns(self, pipe: object) -> bool:
        """Is `pipe` the pipeline of this handle (and not a shallow copy of it), and still accelerated?"""
        return self._pipe() is pipe and not self.retired

    def alive(self) -> bool:
        """Does the pipeline still exist?"""
        return self._pipe() is not None

    def describe(self) -> str:
        """Class of the pipeline and what is on, for messages."""
        pipe = self._pipe()
        return f"{type(pipe).__name__}: {', '.join(self._decision.plan.enabled) or 'nothing enabled'}"

    def __str__(self) -> str:
        return self.details.short()

    def __repr__(self) -> str:
        return f"<Acceleration of {self.describe()}>"

    def _repr_html_(self) -> str:
        return self.details.short_html()

    # ---- attaching -------------------------------------------------------------------------------------

    def adopt(self, decision: Decision, note: str | None = None) -> None:
        """Put a decision into effect in place of the one in force; on an error the old one stays.

        `note` is added to the plan. Waits for runs in other threads; refused inside a run of this one.
        """
        with self.idle("accelerate"):
            notes = self.stack.put(decision.target, decision.levers)
            if note is not None:
                notes = [note, *notes]
            if notes:
                decision = decision._replace(plan=replace(decision.plan, notes=(*decision.plan.notes, *notes)))
            self._decision, self.report, self._measurement = decision, None, None
            self._planned_with = getattr(self.pipe, "scheduler", None)

    def change(self, key: str, value: str | bool | None, parameters: Mapping[str, object] | None = None) -> None:
        """Give one place another value, or none; the levers at other places stay as they are.

        A value that cannot act raises, as its plan item says. A place that was switched off stays off, whatever a rule
        would add.
        """
        if self.run_in_progress() is not None:
            raise IncompatibleError(
                f"{key}: no lever can be changed inside a running call of the same pipeline; do it after the call"
            )
        place, wishes = PLACES[key], self.wishes
        parameters = dict(parameters or {})
        if value is not None and LEVEL in parameters and place.levers[str(value)].levels:
            wishes[LEVEL] = parameters.pop(LEVEL)
        if value is not None:
            require_parameters(key, value, parameters)
        before = wished(wishes, key)
        wishes, taken = exchanged(wishes, key, value, parameters)
        known = self._decision.untouched(key, wishes) if self.stack.fits(lookup(self.pipe)) else {}
        decision = self.decide_again(wishes, known)
        decision.require(key)
        note = next(iter(taken), None)
        if value and before and before != value:
            note = f"{place.item(value)} took the place of {place.item(before)}"
        self.adopt(decision, note)

    def decide_again(self, wishes: dict[str, object], known: Mapping[str, Judged] | None = None) -> Decision:
        """A decision for other wishes, on the same machine and within the same budget; `known` is taken over."""
        old = self._decision
        new = resolve(self.pipe, None, old.plan.budget, old.target.hardware, False, wishes, known)
        return new._replace(plan=replace(new.plan, preset=old.plan.preset))

    def sync(self) -> None:
        """Before a run: follow replaced components, put back hooks that others dropped.

        Where the model is known better than when the plan was made (or is another one), decide again.
        """
        if not self.stack.current():
            self._plan_anew("a denoiser was replaced")
        elif not self.stack.fits(lookup(self.pipe)):
            self._plan_anew("the model is known better now")
        elif self._was_in_the_way():
            self._plan_anew("the scheduler was replaced")
        self.stack.relink()

    def _was_in_the_way(self) -> bool:
        """Was a lever left out because of a scheduler that is no longer the pipeline's?"""
        before = self._planned_with
        if before is getattr(self.pipe, "scheduler", None):
            return False
        return any(item.reason.startswith(f"{type(before).__name__} ") for item in self._decision.plan.items)

    def _plan_anew(self, why: str) -> None:
        """What was on and cannot be any more is warned of: a run would go on without it, and few read plans then."""
        before = self._decision.plan.enabled
        self.adopt(self.decide_again(self.wishes), f"planned anew: {why}")
        for item in self._decision.plan.items:
            if item.name in before and item.status != "enabled":
                warnings.warn(f"{item.name} is off now, as {why}: {item.reason}", UserWarning, stacklevel=2)

    @contextlib.contextmanager
    def aside(self, verb: str) -> Iterator[Decision]:
        """The pipeline as if it had never been accelerated, for the length of the `with`; then all is on again."""
        with self.idle(verb):
            pipe, decision, dressed = self.pipe, self._decision, type(self.pipe)
            placed = self.stack.placed
            self.stack.undo()
            undress(pipe)
            try:
                yield decision
            finally:
                object.__setattr__(pipe, "__class__", dressed)
                vars(pipe)[HANDLE] = self
                self.stack.put(decision.target, placed)

    @contextlib.contextmanager
    def without(self, key: str) -> Iterator[None]:
        """All levers but that of one place, for the length of the `with`; plan and last report stay as they are."""
        with self.idle("without"):
            target, placed, report = self.stack.target, self.stack.placed, self.report
            self.stack.put(target, [row for row in placed if row.rank != PLACES[key].rank])
            try:
                yield
            finally:
                self.stack.put(target, placed)
                self.report = report

    # ---- running ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def idle(self, verb: str) -> Iterator[None]:
        """Hold the lock while no run is in progress (waits for other threads, refuses in this one)."""
        with self.lock:
            if self._runs:
                raise IncompatibleError(f"{verb}() inside a running call of the same pipeline: call it after the run")
            yield

    def run_in_progress(self) -> Run | None:
        """The innermost run of this thread that has begun and not ended, or None."""
        runs = self._runs
        return runs[-1] if runs and runs[-1].thread == threading.get_ident() else None

    def call(self, pipe: Pipeline, call: Forward, args: Args, kwargs: Kwargs) -> Output:
        """Run the pipeline's own `__call__` (`call`) inside a run."""
        with self.lock:
            if self.retired:
                return call(pipe, *args, **kwargs)
            if self._runs:
                pipe = self._clone(pipe)
            return self._call((call, pipe), args, kwargs, None)

    def _call(self, bound: tuple[Forward, Pipeline], args: Args, kwargs: Kwargs, state: Snapshot | None) -> Output:
        call, pipe = bound
        with self.lock, self._frame(pipe, (bound, args, kwargs)) as run:
            if state is not None:
                snapshots.set_rng_states(state.run.rng_start)
                run.replay = snapshots.Replay(state)
            return call(pipe, *args, **own_callbacks(run, kwargs))

    @contextlib.contextmanager
    def _frame(self, pipe: Pipeline, request: Request | None) -> Iterator[Run]:
        if not self._runs:
            self.sync()
        run = Run(pipe, self.stack.target.spec.branch_name, self)
        run.request = request
        for component, module in self.stack.modules.items():
            if getattr(module, "_cache_config", None) is not None:
                run.note(f"diffusers' own cache is on {component}: what it reuses is shown as computed here")
        for name, why in self.stack.displaced().items():
            run.note(f"{name} stood down: {why}")
        if request is not None:
            run.rng_start = snapshots.rng_states(snapshots.generators_of(request[2]))
        completed, observer = False, None
        try:
            for edit in self.stack.edits:
                if edit.begin_run is not None:
                    edit.begin_run(run)
            self._runs.append(run)
            observer = self.watch.open(run)
            with running(run):
                yield run
            completed = not run.was_interrupted()
        finally:
            if observer is not None:
                observer.end_run(run)
            if self._runs and self._runs[-1] is run:
                self._runs.pop()
            self._finish(run, completed)

    def _finish(self, run: Run, completed: bool) -> None:
        stats = {edit.name: dict(edit.stats(run)) for edit in self.stack.edits if edit.stats is not None}
        for edit in reversed(self.stack.edits):
            if edit.end_run is not None:
                edit.end_run(run)
        held = sum(edit.bytes_held(run) for edit in self.stack.edits if edit.bytes_held is not None)
        self.report = run.report(completed, held, stats)
        run.state.clear()
        run.outputs.clear()
        run.bar = run.step_output = None

    def _clone(self, pipe: Pipeline) -> Pipeline:
        clone = copy.copy(pipe)
        if getattr(pipe, "scheduler", None) is not None:
            clone.scheduler = copy.deepcopy(pipe.scheduler)
            unwatch(clone.scheduler)
        for name, guider in guiders(pipe).items():  # they count the calls of a step
            setattr(clone, name, copy.deepcopy(guider))
        return clone
