"""Seed scouting: every seed a few steps far, a preview of each, and only the chosen ones to their end.

A run is paused where `until_step` steps are done (`core.snapshot`) and given up; `finish` goes on from there. What
comes out has the bits of a call that was never paused, under the same plan and with the same noise.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from ..api import attach, restore
from ..core.snapshot import Snapshot
from ..errors import IncompatibleError, InvalidOptionError
from ..handle import Acceleration, handle_of
from ..planner.resolve import require_pipeline
from ..quality.measurement import OURS, require_call, texts_of
from .page import grid, html_page
from .preview import decoding_small, drawn_on, first_of

GIB = 1024**3
SET_HERE = ("callback_on_step_end", "callback_on_step_end_tensor_inputs")
MAY = set(OURS) - {"prompt", "generator"}  # what a measurement sets itself and a scout does not


class _Enough(Exception):
    """Raised in a callback: this run has come far enough."""


@dataclass
class Candidate:
    """One prompt with one seed.

    Attributes:
        preview: a small picture (or frames) of what it will be, in the form that the call's `output_type` asks for;
            None where the pipeline gives none.
        kept: is its paused run at hand? Else `finish` begins anew.
        output: what the pipeline returned, once it is finished.
        scouted, finished: denoiser calls that were computed before and after the pause.
    """

    index: int
    prompt: str
    seed: int
    preview: Any = None
    output: Any = None
    scouted: int = 0
    finished: int = 0
    snapshot: Snapshot | None = field(default=None, repr=False)

    @property
    def kept(self) -> bool:
        """Is its paused run at hand?"""
        return self.snapshot is not None


class Scouting:
    """The candidates of one scouting, and the way on. Use it in a `with`, or `close()` it: paused runs hold memory."""

    def __init__(
        self, handle: Acceleration, until_step: int, call: Mapping[str, Any], limit: float | None, attached: bool
    ) -> None:
        self._handle, self._call, self._limit, self._attached = handle, dict(call), limit, attached
        self.until_step = until_step
        self.candidates: list[Candidate] = []

    def __enter__(self) -> Scouting:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the paused runs; a pipeline that was accelerated for the scouting alone is as before."""
        for candidate in self.candidates:
            candidate.snapshot = None
        if self._attached and not self._handle.retired:
            restore(self._handle.pipe)

    # ---- scouting --------------------------------------------------------------------------------------

    def _begin(self, candidate: Candidate, preview: bool) -> None:
        """Run a candidate up to the pause."""
        pipe, handle = self._handle.pipe, self._handle
        before: list[torch.Tensor] = []
        vae = getattr(pipe, "vae", None) if preview else None
        with contextlib.ExitStack() as stack:

            def at_step(inner: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                if candidate.kept or candidate.output is not None or index + 1 > self.until_step:
                    return {}  # the very run that is going on
                latents = tensors.get("latents")
                if index + 1 < self.until_step:
                    before[:] = [] if latents is None else [latents]
                    return {}
                candidate.snapshot = handle.snapshot()
                if vae is None or latents is None or not hasattr(type(inner), "interrupt"):
                    raise _Enough
                stack.enter_context(decoding_small(vae, _scale(inner)))
                return {"latents": self._drawn_on(candidate.snapshot, before, latents, inner)}

            try:
                output = pipe(**self._arguments(candidate), callback_on_step_end=at_step)
            except _Enough:
                output = None
        candidate.scouted = _computed(handle)
        if candidate.kept:
            candidate.preview = first_of(output)
        else:  # it had no more steps than that
            candidate.output = output

    def _drawn_on(
        self, snapshot: Snapshot, before: list[torch.Tensor], latents: torch.Tensor, pipe: Any
    ) -> torch.Tensor:
        """What the pipeline decodes for the preview; it leaves out the steps to come."""
        pipe._interrupt = True
        run, step = snapshot.run, snapshot.step
        return drawn_on(before[0] if before else None, latents, run.schedule()[1], step, run.scheduler)

    def _arguments(self, candidate: Candidate) -> dict[str, Any]:
        generator = torch.Generator("cpu").manual_seed(candidate.seed)
        return {**self._call, "prompt": candidate.prompt, "generator": generator}

    def _keep_within(self) -> None:
        """Hold one set of stand-in outputs for all (their values do not matter), and no more bytes than allowed."""
        kept = [candidate for candidate in self.candidates if candidate.snapshot is not None]
        first = kept[0].snapshot if kept else None
        for candidate in kept[1:]:
            if first is not None and candidate.snapshot is not None and _alike(first, candidate.snapshot):
                candidate.snapshot = replace(candidate.snapshot, outputs=first.outputs)
        while self._limit is not None and kept and self.bytes_held > self._limit:
            kept.pop().snapshot = None  # the newest: those before it stay together

    @property
    def bytes_held(self) -> int:
        """Bytes of tensors in all paused runs."""
        sizes: dict[int, int] = {}
        for candidate in self.candidates:
            if candidate.snapshot is not None:
                _collect(_parts(candidate.snapshot), sizes, set())
        return sum(sizes.values())

    # ---- going on --------------------------------------------------------------------------------------

    def finish(self, *chosen: int) -> list[Any]:
        """What the pipeline returns for these candidates (by index), in this order; each is run to its end once.

        Raises InvalidOptionError for an index that there is not, before anything is run.
        """
        for index in chosen:
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.candidates):
                raise InvalidOptionError(f"finish: a candidate is 0 to {len(self.candidates) - 1}, got {index!r}")
        return [self._finish(self.candidates[index]) for index in chosen]

    def _finish(self, candidate: Candidate) -> Any:
        if candidate.output is None:
            if candidate.snapshot is not None:
                candidate.output = self._handle.resume(candidate.snapshot)
                candidate.finished = _computed(self._handle) - candidate.scouted
            else:
                candidate.output = self._handle.pipe(**self._arguments(candidate))
                candidate.finished = _computed(self._handle)
            candidate.snapshot = None
        return candidate.output

    @property
    def computed(self) -> int:
        """Denoiser calls that were computed so far, scouting and finishing together."""
        return sum(candidate.scouted + candidate.finished for candidate in self.candidates)

    def page(self, title: str = "Seed scouting") -> str:
        """One self-contained HTML page with every preview (and picture, once finished)."""
        return html_page(self, title)

    def _repr_html_(self) -> str:
        return grid(self)

    def __repr__(self) -> str:
        done = sum(candidate.output is not None for candidate in self.candidates)
        return f"<Scouting of {len(self.candidates)} candidates to step {self.until_step}, {done} finished>"


def scout(
    pipe: Any,
    prompts: str | Sequence[str],
    seeds: int | Sequence[int],
    until_step: int,
    *,
    preview: bool = True,
    memory_gib: float | None = None,
    **call: Any,
) -> Scouting:
    """Run every prompt with every seed for `until_step` steps, under the plan that is on, and show what they become.

    Args:
        pipe: a pipeline, accelerated with the plan of the pictures to come, or plain.
        prompts: one, or several.
        seeds: so many from 0 on, or those given.
        until_step: steps to run of each, at least 1 and fewer than the call's.
        preview: decode a small picture of each (costs a small decode).
        memory_gib: for the paused runs. Those that find no room are run from their beginning when they are chosen.
        **call: the pipeline's own arguments (num_inference_steps, height, ...).

    Raises:
        InvalidOptionError: bad input, before anything is run.
        IncompatibleError: the pipeline has no step callback, or a run of it cannot be paused.
    """
    require_pipeline(pipe)
    texts, numbers = texts_of(prompts, "scout"), _seeds(seeds)
    require_call(pipe, {k: v for k, v in call.items() if k not in MAY}, "scout")
    _require_steps(pipe, until_step, call)
    limit = _limit(memory_gib)
    attached = handle_of(pipe) is None
    if attached:
        attach(pipe)
    handle = pipe.acceleration
    found = Scouting(handle, until_step, call, limit, attached)
    try:
        _require_pause(handle)
        for prompt in texts:
            for seed in numbers:
                found.candidates.append(Candidate(len(found.candidates), prompt, seed))
                found._begin(found.candidates[-1], preview)
                found._keep_within()
    except BaseException:
        found.close()
        raise
    finally:
        if hasattr(type(pipe), "interrupt"):
            pipe._interrupt = False
    return found


# ---- bad input -----------------------------------------------------------------------------------------------------


def _seeds(seeds: object) -> list[int]:
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(seeds))
    listed = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    if not listed or not all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in listed):
        raise InvalidOptionError(f"scout: seeds must be how many, or a list of whole numbers, got {str(seeds)[:60]!r}")
    return listed


def _require_steps(pipe: Any, until_step: object, call: Mapping[str, Any]) -> None:
    known, name = inspect.signature(type(pipe).__call__).parameters, type(pipe).__name__
    if "callback_on_step_end" not in known:
        raise IncompatibleError(f"scout: {name} has no callback_on_step_end, in which a run could be paused")
    for key in SET_HERE:
        if key in call:
            raise InvalidOptionError(f"scout sets {key} itself: leave it out")
    given = call.get("num_inference_steps", getattr(known.get("num_inference_steps"), "default", None))
    most = given - 1 if isinstance(given, int) else None
    whole = isinstance(until_step, int) and not isinstance(until_step, bool)
    if not whole or until_step < 1 or (most is not None and until_step > most):  # type: ignore[operator]
        raise InvalidOptionError(
            f"scout: until_step must be 1 to {most or 'one less than the steps'}, got {until_step!r}"
        )


def _limit(memory_gib: object) -> float | None:
    if memory_gib is None:
        return None
    if isinstance(memory_gib, bool) or not isinstance(memory_gib, (int, float)) or memory_gib < 0:
        raise InvalidOptionError(f"scout: memory_gib must be a number of at least 0, or None, got {memory_gib!r}")
    return memory_gib * GIB


def _require_pause(handle: Acceleration) -> None:
    """Refuse what `snapshot()` would refuse, before anything is run."""
    spec = handle.stack.target.spec
    fixed = [edit.name for edit in handle.stack.edits if not edit.preemptible]
    if spec.no_resume or fixed:
        why = f"{spec.family}: {spec.no_resume}" if spec.no_resume else f"{', '.join(fixed)} cannot be paused"
        raise IncompatibleError(f"scout: {why}")


# ---- what is held --------------------------------------------------------------------------------------------------


def _parts(snapshot: Snapshot) -> tuple[Any, ...]:
    return snapshot.step_output, snapshot.scheduler, snapshot.states, snapshot.outputs


def _collect(value: Any, sizes: dict[int, int], seen: set[int]) -> None:
    """Bytes of every tensor's storage in a nest of containers and objects of ours, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, Mapping):
        for part in value.values():
            _collect(part, sizes, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            _collect(part, sizes, seen)
    elif is_dataclass(value) and not isinstance(value, type):
        for row in fields(value):
            _collect(getattr(value, row.name), sizes, seen)
    elif type(value).__module__.startswith("diffaccel."):  # a lever's state of a run
        names = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        for name in {*names, *getattr(value, "__dict__", {})}:
            _collect(getattr(value, name, None), sizes, seen)


def _alike(one: Snapshot, other: Snapshot) -> bool:
    """Have the stand-in outputs of both the same form?"""
    return bool(_form(one.outputs) == _form(other.outputs))


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, Mapping):
        return [(key, _form(part)) for key, part in value.items()]
    return [_form(part) for part in value] if isinstance(value, (list, tuple)) else type(value)


def _computed(handle: Acceleration) -> int:
    report = handle.report
    return 0 if report is None else sum(step.computed for step in report.steps)


def _scale(pipe: Any) -> int:
    """Pixels per latent."""
    found = (getattr(pipe, name, None) for name in ("vae_scale_factor", "vae_scale_factor_spatial"))
    return int(next((value for value in found if isinstance(value, int)), 8))
