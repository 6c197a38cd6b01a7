"""Real runs of one pipeline on a few prompts: plain ones written down, schedules and rivals compared with them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from ..api import accelerate, restore
from ..errors import DiffaccelError
from ..quality.measurement import SMALLEST, generate
from ..quality.metrics import psnr, ssim
from .record import Recording, record
from .rivals import scheduled, schedulers
from .skips import Mask, Method

# How a pipeline may fail under a scheduler that it was not written for.
FAULTS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError, DiffaccelError)
CAP_DB = 100.0  # identical pictures have no finite PSNR, and a mean needs one


@dataclass(frozen=True)
class Trial:
    """What one setting came to: PSNR in dB and SSIM to the plain pictures, per prompt; steps that were computed."""

    psnr_db: tuple[float, ...]
    ssim: tuple[float, ...]
    computed: float
    seconds: float

    @property
    def mean_db(self) -> float:
        """Mean PSNR over prompts."""
        return fmean(self.psnr_db)


@dataclass
class Ground:
    """A plain pipeline with prompts, seeds and a call. `known` are rows of an earlier search (`journal.Journal`).

    Plain pictures do not lie in a journal: where they are wanted again, the plain runs are made again.
    """

    pipe: Any
    prompts: Sequence[str]
    seeds: Sequence[int]
    call: Mapping[str, Any]
    batch: int = 1
    _recording: Recording | None = field(default=None, repr=False)

    def recording(self) -> Recording:
        """The plain runs, made once."""
        if self._recording is None:
            self._recording = record(self.pipe, self.prompts, self.seeds, self.call, self.batch)
        return self._recording

    def one_by_one(self) -> Ground:
        """The same, one prompt at a time: for methods that decide by what they see."""
        return Ground(self.pipe, self.prompts, self.seeds, self.call, 1, self._recording)

    def schedule(self, mask: Mask, method: Method, coordinate: str) -> Trial:
        """Every prompt under a step schedule."""
        return self.accelerated(wishes_of(mask, method, coordinate))

    def accelerated(self, wishes: Mapping[str, Any]) -> Trial:
        """Every prompt under overrides of `accelerate`."""
        self.recording()
        accelerate(self.pipe, None, strict=True, **wishes)
        try:
            return self._compare(nullcontext(), {})
        finally:
            restore(self.pipe)

    def rival(self, name: str, steps: int) -> Trial | str:
        """Every prompt with so many evaluations by a scheduler of `schedulers`; where it cannot run, why."""
        self.recording()
        made, asked = schedulers(self.pipe.scheduler), self.call["num_inference_steps"]
        more = {"num_inference_steps": round(steps * asked / len(self.recording().axis))}  # image to image runs fewer
        try:
            return self._compare(scheduled(self.pipe, made[name]()), more, steps)
        except FAULTS as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:120]

    def _compare(self, frame: AbstractContextManager[None], changes: Mapping[str, Any], steps: int = 0) -> Trial:
        plain, made, computed, began = self.recording().pictures, [], [], time.perf_counter()
        with frame:
            for start in range(0, len(self.prompts), self.batch):
                part = slice(start, start + self.batch)
                made.append(generate(self.pipe, self.prompts[part], self.seeds[part], {**self.call, **changes}))
                computed.append(steps or computed_steps(self.pipe))
        seconds, pictures = time.perf_counter() - began, np.concatenate(made)
        pairs = list(zip(plain, pictures, strict=True))
        big = min(plain.shape[-3:-1]) >= SMALLEST
        return Trial(
            tuple(min(psnr(a[None], b[None]), CAP_DB) for a, b in pairs),
            tuple(ssim(a[None], b[None]) for a, b in pairs) if big else (),
            fmean(computed),
            seconds / len(self.prompts),
        )


def computed_steps(pipe: Any) -> float:
    """Steps of the last run in which the denoiser ran, in the mean over guidance branches."""
    calls = pipe.acceleration.report.steps
    branches = {step.branch for step in calls}
    return float(sum(step.computed for step in calls) / max(1, len(branches)))


def wishes_of(mask: Mask, method: Method, coordinate: str) -> dict[str, object]:
    """A schedule as overrides of `accelerate`."""
    wishes: dict[str, object] = {
        "cache": "schedule",
        "cache_steps": text_of(mask),
        "cache_order": method.order,
        "cache_coordinate": coordinate,
        "cache_min_steps": min(9, len(mask)),
    }
    return {**wishes, "cache_correct": method.correct} if method.correct else wishes


def text_of(mask: Mask) -> str:
    """One digit per step, 1: computed."""
    return "".join("1" if flag else "0" for flag in mask)


def mask_of(text: str) -> Mask:
    """The inverse of `text_of`."""
    return tuple(digit == "1" for digit in text)
