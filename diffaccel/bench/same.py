"""`determinism`: does a run give the same bits again, elsewhere in a batch, compiled, on other threads, in another
process? If not, how far apart are the pictures, and which module in which step parted first?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..api import plan
from ..errors import DiffaccelError, InvalidOptionError, unknown
from ..handle import handle_of
from ..quality.measurement import require_call, seeds_of, texts_of, untouched
from .child import in_a_process
from .contender import contenders
from .lab import Lab
from .rows import align
from .tracing import Trace

CHECKS = ("repeat", "batch", "position", "compile", "threads", "processes")
_SAID = {
    "repeat": "same seed twice",
    "batch": "alone and in a batch of two",
    "position": "first and second of a batch",
    "compile": "compiled and not",
    "threads": "one thread and two",
    "processes": "another process",
}
Run = Callable[[int | None], tuple[np.ndarray, Trace]]  # the index of a call to keep -> picture, trace


@dataclass(frozen=True)
class Finding:
    """One check. `equal` is None where it could not be run (`reason`). Else `largest` is the largest difference of the
    two pictures in 0..1, `step` and `site` say which module parted first (step None: outside of the loop), and
    `at_start` how far its outputs were apart."""

    check: str
    equal: bool | None
    largest: float = 0.0
    step: int | None = None
    site: str | None = None
    at_start: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        return "  ".join(self.cells())

    def cells(self) -> tuple[str, str, str]:
        """What was compared, the verdict, where it starts."""
        said = _SAID[self.check]
        if self.equal is None:
            return said, "not run", self.reason
        if self.equal:
            return said, "bit-equal", ""
        if self.site is None:
            return said, f"largest difference {self.largest:.3g}", "no module that is watched parted"
        where = "outside of the loop" if self.step is None else f"step {self.step + 1}"
        return said, f"largest difference {self.largest:.3g}", f"from {where}, {self.site} ({self.at_start:.3g} there)"


def determinism(
    pipe: Any,
    prompts: object,
    *,
    checks: Sequence[str] = CHECKS,
    wish: object = None,
    seed: int = 0,
    source: str | None = None,
    compile_options: Mapping[str, Any] | None = None,
    **call: Any,
) -> list[Finding]:
    """Compare runs of the first prompt that should be the same; the second prompt (or the first again) fills batches.

    Args:
        pipe: a diffusers pipeline that takes a prompt; afterwards as before.
        checks: any of CHECKS.
        wish: what is on in all runs (see `contender.contenders`); the plain pipeline unless given.
        source: how another process builds the pipeline (see `sources.load`); without it that check is not run.
        compile_options: more overrides where it is compiled, such as compile_backend.
        call: the pipeline's own arguments.

    Raises InvalidOptionError for bad input before anything runs.
    """
    texts = texts_of(prompts, "determinism")
    seeds_of(seed, 1, "determinism")
    require_call(pipe, call, "determinism")
    for name in checks:
        if name not in CHECKS:
            raise unknown("check", str(name), CHECKS)
    one = contenders([wish])[-1]
    if one.steps is not None or one.scheduler != "own":
        raise InvalidOptionError(
            "determinism: wish is a preset or overrides of accelerate, without steps or scheduler"
        )
    lab = Lab(pipe, (texts[0], texts[-1]), seed, call, one)
    found = []
    with ExitStack() as stack:
        handle = handle_of(pipe)
        if handle is not None:
            stack.enter_context(handle.aside("determinism"))
        stack.enter_context(untouched(pipe))
        for name in checks:
            found.append(_check(lab, name, source, dict(compile_options or {})))
    return found


def table(findings: Sequence[Finding]) -> str:
    """One line per check."""
    return "\n".join(align([("runs compared", "verdict", "where it starts"), *(one.cells() for one in findings)]))


def plain_data(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Ready for JSON."""
    return [asdict(one) for one in findings]


def _check(lab: Lab, name: str, source: str | None, options: Mapping[str, Any]) -> Finding:
    usual = functools.partial(lab.run)
    if name == "repeat":
        return _compare(name, usual, usual)
    if name == "batch":
        return _compare(name, usual, functools.partial(lab.run, row=(0, 2)))
    if name == "position":
        return _compare(name, functools.partial(lab.run, row=(0, 2)), functools.partial(lab.run, row=(1, 2)))
    if name == "threads":
        return _compare(name, functools.partial(lab.run, threads=1), functools.partial(lab.run, threads=2))
    if name == "compile":
        item = plan(lab.pipe, lab.one.preset, **{**lab.one.overrides, "compile": True, **options}).item("compile")
        if item.status != "enabled":
            return Finding(name, None, reason=item.reason)
        return _compare(name, usual, functools.partial(lab.run, more={"compile": True, **options}))
    if source is None:
        return Finding(name, None, reason="it is not known how another process builds this pipeline (source)")
    wish = {**lab.one.overrides, **({} if lab.one.preset is None else {"preset": lab.one.preset})}
    job = {"source": source, "prompt": lab.texts[0], "seed": lab.seed, "call": dict(lab.call), "wish": wish}
    try:
        return _compare(name, usual, functools.partial(in_a_process, job))
    except DiffaccelError as error:
        return Finding(name, None, reason=str(error))


def _compare(name: str, one: Run, two: Run) -> Finding:
    """Run both; where they part, run both again to see how far they are apart there."""
    (ours, first), (theirs, second) = one(None), two(None)
    parted = first.parts_at(second)
    same = np.array_equal(ours, theirs, equal_nan=True)
    if same and parted is None:
        return Finding(name, True)
    largest = float(np.nanmax(np.abs(ours.astype(np.float64) - theirs))) if ours.shape == theirs.shape else 1.0
    if parted is None or parted >= min(len(first.marks), len(second.marks)):
        return Finding(name, same, largest)
    mark = first.marks[parted]
    kept = [run(parted)[1].kept for run in (one, two)]
    return Finding(name, same, largest, mark.step, mark.site, _apart(*kept))


def _apart(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of outputs; infinite where their shapes differ."""
    if [one.shape for one in ours] != [one.shape for one in theirs]:
        return float("inf")
    return max((float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True) if a.numel()), default=0.0)
