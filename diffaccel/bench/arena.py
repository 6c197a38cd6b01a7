"""One pipeline on which contenders take turns: each is put on when its turn comes, and stays on for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ..api import accelerate, attach, restore
from ..core.report import RunReport
from ..handle import handle_of
from ..planner.plan import Plan
from ..quality.measurement import generate, untouched
from ..tune.rivals import scheduled, schedulers
from .contender import Contender

Clock = Callable[[], float]


@dataclass(frozen=True)
class Lap:
    """One run: pictures [B, ...] in 0..1, wall seconds of the call, the report and the plan where one was on, and peak
    bytes allocated on a GPU (None on a CPU, where the peak of a process only grows)."""

    pictures: np.ndarray
    seconds: float
    report: RunReport | None
    plan: Plan | None
    peak_bytes: int | None


class Arena:
    """Use as a context manager: afterwards pipeline, scheduler and random state are as before, and what was on is on
    again. `attach_s` has the seconds that putting each contender on took, by its name."""

    def __init__(self, pipe: Any, clock: Clock = time.perf_counter) -> None:
        self.pipe, self.clock = pipe, clock
        self.attach_s: dict[str, list[float]] = {}
        self._on: Contender | None = None
        self._outer, self._inner = ExitStack(), ExitStack()

    def __enter__(self) -> Arena:
        handle = handle_of(self.pipe)
        if handle is not None:
            self._outer.enter_context(handle.aside("bench"))
        self._outer.enter_context(untouched(self.pipe))
        self._outer.callback(self.clear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._outer.__exit__(kind, error, at)

    def clear(self) -> None:
        """The pipeline plain."""
        self._on = None
        self._inner.close()

    def put(self, contender: Contender) -> bool:
        """Put it on, unless it is; whether something was changed."""
        if self._on is contender:
            return False
        self.clear()
        began = self.clock()
        if contender.accelerated:
            accelerate(self.pipe, contender.preset, **contender.overrides)
            self._inner.callback(restore, self.pipe)
        elif contender.scheduler != "own":
            made = schedulers(self.pipe.scheduler)
            own = made["own"]  # a rival of the pipeline's own class is the pipeline's own
            self._inner.enter_context(scheduled(self.pipe, made.get(contender.scheduler, own)()))
        self._sync()
        self.attach_s.setdefault(contender.name, []).append(self.clock() - began)
        self._on = contender
        return True

    def lap(
        self,
        contender: Contender,
        prompts: Sequence[str],
        seeds: Sequence[int],
        call: Mapping[str, Any],
        *,
        watched: bool = False,
    ) -> Lap:
        """One run of the contender. `watched`: one without a plan has a report as well, at the price of the hooks that
        write it."""
        self.put(contender)
        if contender.steps is not None:
            call = {**call, "num_inference_steps": contender.steps}
        bare = watched and not contender.accelerated
        with self._attached() if bare else nullcontext():
            self._sync()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            began = self.clock()
            pictures = generate(self.pipe, prompts, seeds, call)
            self._sync()
            seconds = self.clock() - began
            handle = handle_of(self.pipe)
            report, plan = (None, None) if handle is None else (handle.report, handle.plan)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        return Lap(pictures, seconds, report, plan if contender.accelerated else None, peak)

    def _attached(self) -> AbstractContextManager[object]:
        attach(self.pipe)
        stack = ExitStack()
        stack.callback(restore, self.pipe)
        return stack

    @staticmethod
    def _sync() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
