"""Time one pipeline at several strengths of acceleration, fairly.

The runs are interleaved (plain, gentle, medium, strong, plain, ...), so that a machine that gets warm or busy
slows all of them alike; the first round warms up and is thrown away; each figure is the median of the others.
Every run starts from the same noise, so its pictures differ from the plain ones by the acceleration alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Strength:
    """One setting to measure: a preset with overrides, or the plain pipeline (`preset=None`)."""

    name: str
    preset: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)


BATCH = 8  # prompts that go through the pipeline at once: the memory of a run does not grow with their number
PLAIN = Strength("plain")
# Threshold: the largest relative change of the first block's residual that counts as nothing new. The medium
# strength is the preset as it is.
STRENGTHS: tuple[Strength, ...] = (
    PLAIN,
    Strength("gentle", "cpu-demo", {"cache_threshold": 0.08}),
    Strength("medium", "cpu-demo"),
    Strength("strong", "cpu-demo", {"cache_threshold": 0.4}),
)


@dataclass
class Outcome:
    """What one strength did: per step whether the denoiser was computed, wall seconds per round, pictures."""

    name: str
    computed: tuple[bool, ...] = ()
    seconds: list[float] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    table: str = ""

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
    rounds: int = 3,
    seed: int = 0,
    batch: int = BATCH,
    strengths: Sequence[Strength] = STRENGTHS,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Outcome]:
    """One outcome per strength, in their order, from `rounds` measured rounds after one warm-up round.

    At most `batch` prompts go through the pipeline at once; prompt i starts from the noise of seed + i. `tick` is
    called after each of the (rounds + 1) * len(strengths) runs. The pipeline is left plain, whatever happens.
    """
    outcomes = [Outcome(strength.name) for strength in strengths]
    kwargs = {**call_kwargs, "num_inference_steps": steps}
    for number in range(rounds + 1):
        for strength, outcome in zip(strengths, outcomes, strict=True):
            seconds = _one_run(pipe, prompts, kwargs, seed, batch, strength, outcome, clock)
            if number > 0:
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
    if strength.preset is not None:
        accelerate(pipe, preset=strength.preset, **strength.overrides)
    try:
        for begin in range(0, len(prompts), batch):
            some = list(prompts[begin : begin + batch])
            generators = [torch.Generator("cpu").manual_seed(seed + begin + i) for i in range(len(some))]
            started = clock()
            result = pipe(some, generator=generators, **call_kwargs)
            seconds += clock() - started
            # A video is a list of pictures.
            outcome.images += result.images if hasattr(result, "images") else result.frames
            computed.append((True,) * call_kwargs["num_inference_steps"])
            if strength.preset is not None:
                computed[-1] = computed_steps(pipe.acceleration.report)
        if strength.preset is not None:
            outcome.plan, outcome.table = pipe.acceleration.plan.to_dict(), str(pipe.acceleration)
    finally:
        restore(pipe)
    outcome.computed = tuple(any(flags) for flags in zip(*computed, strict=True))
    return seconds


def computed_steps(report: Any) -> tuple[bool, ...]:
    """Per step, whether any denoiser call of it (there may be several guidance branches) was computed."""
    steps: dict[int, bool] = {}
    for record in report.steps:
        steps[record.index] = steps.get(record.index, False) or record.computed
    return tuple(steps[index] for index in sorted(steps))
