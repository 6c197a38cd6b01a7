"""Pause a run at a step boundary and finish it later, bit-equal to a run that was never disturbed.

A diffusers pipeline is one Python call with a loop inside, which cannot be left and re-entered. A snapshot
therefore keeps what the loop depends on (latents, scheduler, generators, cache states) and `resume` calls the
pipeline again with the same arguments: the steps already done cost nothing (the denoiser answers with a stored
output, the scheduler with the stored latents), then the state is put in place and the loop goes on.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import DiffaccelError
from .clock import TAPS
from .state import PerRun

if TYPE_CHECKING:
    from .compat import Args, Kwargs, Output
    from .run import Call, Run


ARRAYS = ("timesteps", "sigmas")


@dataclass(frozen=True)
class Snapshot:
    """A run paused at a step boundary (opaque; made by `pipe.acceleration.snapshot()`)."""

    run: Run
    ticks: int
    step: int
    step_output: Output
    scheduler: dict[str, object]
    states: dict[str, PerRun]
    outputs: dict[tuple[str, str], Output]
    calls: list[Call]
    rng: list[tuple[torch.Generator | None, torch.Tensor]]
    hits: int
    edits: int
    bytes_held: dict[str, int]  # per accelerator
    bytes_peak: int


def clone_tensors(value: Output) -> Output:
    """A copy of a scheduler's output (tuple or dataclass) with its own tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(clone_tensors(v) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: clone_tensors(getattr(value, f.name)) for f in fields(value)})
    return value


def generators_of(kwargs: Kwargs) -> list[torch.Generator | None]:
    """The generators a pipeline call may draw from; None is torch's global one (some schedulers draw from it)."""
    given = kwargs.get("generator")
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    return [None, *(g for g in found if g is not None)]


def rng_states(generators: list[torch.Generator | None]) -> list[tuple[torch.Generator | None, torch.Tensor]]:
    """The present state of each generator."""
    return [(g, torch.get_rng_state() if g is None else g.get_state()) for g in generators]


def set_rng_states(states: list[tuple[torch.Generator | None, torch.Tensor]]) -> None:
    """Put generators back."""
    for generator, state in states:
        if generator is None:
            torch.set_rng_state(state)
        else:
            generator.set_state(state)


def take(run: Run) -> Snapshot:
    """Snapshot `run`, which must stand at a step boundary (inside `callback_on_step_end`)."""
    if run.calls_in_step or run.step_output is None:
        raise DiffaccelError(
            "snapshot() works at a step boundary: call it inside callback_on_step_end (a scheduler step must have "
            "ended and no denoiser call of the next step begun)"
        )
    scheduler = {k: v for k, v in vars(run.scheduler).items() if k not in TAPS}
    return Snapshot(
        run=run,
        ticks=run.ticks,
        step=run.step,
        step_output=clone_tensors(run.step_output),
        scheduler=copy.deepcopy(scheduler),
        states={name: state.fork() for name, state in run.state.items()},
        outputs=dict(run.outputs),
        calls=list(run.calls),
        rng=rng_states(generators_of(run.request[2])) if run.request else [],
        hits=run.hits,
        edits=run.edits,
        bytes_held=dict(run.bytes_held),
        bytes_peak=run.bytes_peak,
    )


def _into(array: Output, value: Output) -> Output:
    """The array that a loop may be going over views of, with other values."""
    if not isinstance(array, torch.Tensor) or not isinstance(value, torch.Tensor) or array.shape != value.shape:
        return value
    return array if torch.equal(array, value) else array.copy_(value)


def put_back(run: Run, snapshot: Snapshot) -> None:
    """Give `run` the state of the snapshot (scheduler, caches, generators)."""
    own = vars(run.scheduler)
    for name, value in copy.deepcopy(snapshot.scheduler).items():
        own[name] = _into(own.get(name), value) if name in ARRAYS else value
    run.state = {name: state.fork() for name, state in snapshot.states.items()}
    set_rng_states(snapshot.rng)
    run.edits = snapshot.edits
    run.bytes_held = dict(snapshot.bytes_held)
    run.bytes_peak = max(run.bytes_peak, snapshot.bytes_peak)


class Replay:
    """Takes a fresh call of the pipeline past the steps that a snapshot already has."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.pending = True

    def output(self, component: str, branch: str) -> Output:
        """A denoiser output of the right form; its values do not matter."""
        key = (component, branch)
        if key not in self.snapshot.outputs:
            raise DiffaccelError(f"cannot resume: {component} was never called for branch {branch!r} before the pause")
        return self.snapshot.outputs[key]

    def step(self, run: Run, args: Args, kwargs: Kwargs) -> Output:
        """Stands for `scheduler.step` while steps are replayed."""
        output = clone_tensors(self.snapshot.step_output)
        run.tick(output)
        if run.ticks == self.snapshot.ticks:
            put_back(run, self.snapshot)
            run.calls[:] = self.snapshot.calls
            run.hits = self.snapshot.hits
            self.pending = False
        return output

    def covers(self, run: Run) -> bool:
        """Is the step that just ended one that was done before the pause?"""
        return run.ticks <= self.snapshot.ticks
