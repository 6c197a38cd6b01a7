"""Time one pipeline at several strengths of acceleration, fairly.

The runs are interleaved (plain, careful, balanced, fast, plain, ...), so that a machine that gets warm or busy
slows all of them alike; the first round warms up and is thrown away; each figure is the median of the others.
Every run starts from the same noise, so its pictures differ from the plain ones by the acceleration alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from .native import by_step, first_block

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Strength:
    """One setting to measure: a preset with overrides, or the plain pipeline (`preset=None`), this with fewer `steps`
    or with diffusers' own first-block cache at a `threshold`."""

    name: str
    preset: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    threshold: float | None = None


BATCH = 8  # prompts that go through the pipeline at once: the memory of a run does not grow with their number
PLAIN = Strength("plain")


@dataclass
class Outcome:
    """What one strength did: per step whether the denoiser was computed (in any batch), how many steps were on average
    over the prompts, wall seconds per round, pictures."""

    name: str
    computed: tuple[bool, ...] = ()
    seconds: list[float] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    table: str = ""
    mean_computed: float = 0.0

    @property
    def median_s(self) -> float:
        """Median wall seconds of the measured rounds."""
        return median(self.seconds)


def measure(
    pipe: Any,
    prompts: Sequence[str],
    call_kwargs: Mapping[str, Any],
    *,
    steps: int = 28,
    strengths: Sequence[Strength],
    rounds: int = 3,
    warm_up: int = 1,
    seed: int = 0,
    batch: int = BATCH,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Outcome]:
    """One outcome per strength, in their order, from `rounds` measured rounds after `warm_up` others.

    At most `batch` prompts go through the pipeline at once; prompt i starts from the noise of seed + i. `tick` is
    called after each of the (rounds + warm_up) * len(strengths) runs. The pipeline is left plain, whatever happens.
    """
    outcomes = [Outcome(strength.name) for strength in strengths]
    kwargs = {**call_kwargs, "num_inference_steps": steps}
    for number in range(rounds + warm_up):
        for strength, outcome in zip(strengths, outcomes, strict=True):
            seconds = _one_run(pipe, prompts, kwargs, seed, batch, strength, outcome, clock)
            if number >= warm_up:
                outcome.seconds.append(seconds)
            tick()
    return outcomes


def _one_run(
    pipe: Any,
    prompts: Sequence[str],
    call_kwargs: Mapping[str, Any],
    seed: int,
    batch: int,
    strength: Strength,
    outcome: Outcome,
    clock: Callable[[], float],
) -> float:
    """Run once, batch by batch, and fill in the outcome; the wall seconds of the pipeline's calls alone. A step counts
    as computed where it was in any batch."""
    import torch

    from diffaccel import accelerate, restore

    seconds, outcome.images, computed = 0.0, [], []
    counts: list[int] = []
    if strength.steps is not None:
        call_kwargs = {**call_kwargs, "num_inference_steps": strength.steps}
    steps = call_kwargs["num_inference_steps"]
    if strength.preset is not None:
        accelerate(pipe, preset=strength.preset, **strength.overrides)
    try:
        for begin in range(0, len(prompts), batch):
            some = list(prompts[begin : begin + batch])
            generators = [torch.Generator("cpu").manual_seed(seed + begin + i) for i in range(len(some))]
            with _native(pipe, strength.threshold) as told:
                started = clock()
                result = pipe(some, generator=generators, **call_kwargs)
                seconds += clock() - started
            # A video is a list of pictures.
            outcome.images += result.images if hasattr(result, "images") else result.frames
            computed.append((True,) * steps)
            if strength.preset is not None:
                computed[-1] = computed_steps(pipe.acceleration.report)
            elif told:
                computed[-1] = by_step(told, steps)
            counts += [sum(computed[-1])] * len(some)
        if strength.preset is not None:
            outcome.plan, outcome.table = pipe.acceleration.plan.to_dict(), str(pipe.acceleration)
    finally:
        restore(pipe)
    outcome.computed = tuple(any(flags) for flags in zip(*computed, strict=True))
    outcome.mean_computed = mean(counts)
    return seconds


def _native(pipe: Any, threshold: float | None) -> contextlib.AbstractContextManager[list[bool]]:
    return contextlib.nullcontext([]) if threshold is None else first_block(pipe, threshold)


def computed_steps(report: Any) -> tuple[bool, ...]:
    """Per step, whether any denoiser call of it (there may be several guidance branches) was computed."""
    steps: dict[int, bool] = {}
    for record in report.steps:
        steps[record.index] = steps.get(record.index, False) or record.computed
    return tuple(steps[index] for index in sorted(steps))
