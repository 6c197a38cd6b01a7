"""`check(pipe)`: the environment, then the pipeline as it is, then (if asked) every lever alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..api import attach, restore
from ..core.modular import is_modular
from ..errors import IncompatibleError, InvalidOptionError, nearest
from ..handle import handle_of
from ..ledger.hardware import Hardware
from ..planner.resolve import choose_hardware, require_pipeline
from ..quality.measurement import untouched
from . import checks_levers, checks_run, foreign, loras
from .diagnosis import Diagnosis, Finding
from .faults import FAULTS
from .installation import environment
from .patient import Patient
from .trials import chosen, try_all

GIB = 1024**3
MEMINFO = Path("/proc/meminfo")
PROMPT = "a red ring on a wooden table"

CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    checks_run.errors,
    checks_run.numbers,
    checks_run.memory,
    checks_run.prompts,
    checks_levers.displaced,
    checks_levers.idle,
    checks_levers.originals,
    foreign.cut_off,
    loras.scales,
    loras.acting,
    checks_levers.fidelity,
    checks_levers.decoding,
    checks_run.graphs,  # last: it compiles
)
AFTER_AN_ERROR = (checks_run.errors, checks_run.memory, checks_levers.displaced)


def check(
    pipe: Any = None,
    *,
    call: Mapping[str, Any] | None = None,
    seed: int = 0,
    levers: str | Sequence[str] = (),
    sizes: Sequence[tuple[int, int]] = (),
    lora_files: Mapping[str, Any] | None = None,
    memory_gib: float | None = None,
    host_gib: float | None = None,
    hardware: str | Hardware | None = None,
) -> Diagnosis:
    """Examine this machine and, where one is given, a pipeline. It is afterwards as before.

    Args:
        pipe: a diffusers pipeline, accelerated or not. Without one, only the environment is looked at.
        call: arguments of its calls (prompt, size, steps; twelve steps where none are given).
        seed: of the noise.
        levers: plan items to try one by one ("all", "cache.first_block", ...), each with a short run and an undo; only
            on a pipeline that is not accelerated.
        sizes: other (width, height) to run, where something is compiled; a little larger ones where none are given.
        lora_files: adapter -> the file, folder or state dict that diffusers loaded it from, to compare its scale.
        memory_gib, host_gib: take these for the memory of the device and for what the host has free.
        hardware: judge the kernels for another machine ("h100").

    Raises:
        InvalidOptionError: not a pipeline, or an argument that its call does not take.
        IncompatibleError: levers are to be tried on a pipeline that is accelerated, or it is a modular one.
    """
    surroundings = environment(hardware)
    found = [Finding(fault, "this machine", evidence) for fault, evidence in surroundings.problems]
    if pipe is None:
        return Diagnosis(surroundings, findings=tuple(found))
    require_pipeline(pipe)
    if is_modular(pipe):
        raise IncompatibleError(
            f"doctor: {type(pipe).__name__} is modular: its calls are not known; check() alone works"
        )
    call, tries = _call(pipe, call), chosen(levers)
    if tries and handle_of(pipe) is not None:
        raise IncompatibleError("levers=: each is tried alone: restore(pipe) first, or leave levers out")
    limits = (_bytes("memory_gib", memory_gib), _bytes("host_gib", host_gib))
    found += foreign.signs(pipe)
    with untouched(pipe):
        name = next(k.__name__ for k in type(pipe).__mro__ if not k.__module__.startswith("diffaccel."))
        seen, remarks = _examine(pipe, call, seed, sizes, lora_files or {}, limits)
        trials, more, rest = try_all(pipe, call, seed, tries) if tries else ([], [], [])
    order = list(FAULTS)
    found = sorted(dict.fromkeys([*found, *seen, *more]), key=lambda finding: order.index(finding.fault))
    return Diagnosis(surroundings, name, tuple(found), tuple(trials), tuple(dict.fromkeys([*remarks, *rest])))


def _examine(
    pipe: Any,
    call: Mapping[str, Any],
    seed: int,
    sizes: Sequence[tuple[int, int]],
    lora_files: Mapping[str, Any],
    limits: tuple[float | None, float | None],
) -> tuple[list[Finding], list[str]]:
    """(findings, remarks) of the pipeline as it is: two runs of it, and what the checks ask for."""
    ours = handle_of(pipe)
    if ours is None:
        attach(pipe)  # for the report of each call; nothing is on
    try:
        handle = pipe.acceleration
        device = choose_hardware(pipe, None)
        memory = limits[0] if limits[0] is not None else device.memory_gib and device.memory_gib * GIB
        host = limits[1] if limits[1] is not None else host_free_bytes()
        patient = Patient(
            pipe, handle, call, seed, handle.stack.displaced(), handle.plan, memory, host, sizes, lora_files
        )
        patient.first = patient.run()
        patient.plan = handle.plan  # with what the run measured
        if patient.first.error is None:
            patient.second = patient.run()
        checks = CHECKS if patient.first.error is None else AFTER_AN_ERROR
        return [finding for one in checks for finding in one(patient)], patient.remarks
    finally:
        if ours is None:
            restore(pipe)


def _call(pipe: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The call's arguments, with a prompt where none is given. Refuses what the pipeline does not take."""
    name, known = type(pipe).__name__, inspect.signature(type(pipe).__call__).parameters
    call = dict(given or {})
    for key in call:
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise InvalidOptionError(f"call: {name} takes no {key!r}: {nearest(str(key), known)}")
    if "prompt" in known and "prompt" not in call and call.get("prompt_embeds") is None:
        call["prompt"] = PROMPT
    call.pop("generator", None)  # made anew for every run, from `seed`
    return call


def _bytes(name: str, gib: float | None) -> float | None:
    if gib is None:
        return None
    if isinstance(gib, bool) or not isinstance(gib, (int, float)) or gib <= 0:
        raise InvalidOptionError(f"{name} must be a number above 0, or None, got {gib!r}")
    return gib * GIB


def host_free_bytes(text: str | None = None) -> float:
    """What the host can still give, as Linux says it (`text`: that file's); infinite where nobody says."""
    if text is None:
        text = MEMINFO.read_text() if MEMINFO.is_file() else ""
    row = next((line for line in text.splitlines() if line.startswith("MemAvailable:")), "")
    return float(row.split()[1]) * 1024 if row else float("inf")
