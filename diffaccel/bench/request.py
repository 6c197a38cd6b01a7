"""What a measurement was asked for, checked before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import plan
from ..errors import InvalidOptionError, clipped
from ..quality.measurement import require_call, seeds_of, texts_of
from .arena import Clock
from .contender import Contender, contenders

SIZES = ("width", "height", "num_frames")
LEVEL = 0.9
Score = Callable[[Any, str], float]
Size = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """All that a measurement needs but the pipeline. `sizes`: (width, height) or (width, height, frames) of each
    bucket; an empty one is the pipeline's own. The first contender that is plain is the baseline."""

    contenders: tuple[Contender, ...]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int
    batch: int
    sizes: tuple[Size, ...]
    call: Mapping[str, Any]
    level: float = LEVEL
    floor: int = 2
    score: Score | None = None
    clock: Clock = time.perf_counter
    say: Callable[[str], object] = lambda line: None

    @property
    def baseline(self) -> Contender:
        """The pipeline as it is."""
        return next(one for one in self.contenders if one.is_baseline)

    def at(self, size: Size) -> dict[str, Any]:
        """The call's arguments in a bucket."""
        return {**self.call, **dict(zip(SIZES, size, strict=False))}


def request(
    pipe: Any,
    plans: object,
    prompts: object,
    *,
    seeds: object = 0,
    rounds: int = 10,
    batch: int = 1,
    sizes: Sequence[Size] = (),
    call: Mapping[str, Any] | None = None,
    level: float = LEVEL,
    floor: int = 2,
    verb: str = "bench",
    **rest: Any,
) -> Request:
    """A checked request; every plan is made once, which touches nothing. Raises InvalidOptionError for bad input."""
    texts = texts_of(prompts, verb)
    given = seeds_of(seeds, len(texts), verb)
    for name, value, least in (("rounds", rounds, 1), ("batch", batch, 1), ("floor", floor, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidOptionError(f"{verb}: {name} must be a whole number of at least {least}, got {value!r}")
    if not isinstance(level, float) or not 0 < level < 1:
        raise InvalidOptionError(f"{verb}: level must be a probability between 0 and 1, got {level!r}")
    for size in sizes:
        if len(size) not in (2, 3) or not all(isinstance(side, int) and side > 0 for side in size):
            raise InvalidOptionError(f"{verb}: a size is (width, height) or (width, height, frames), got {size!r}")
    found = contenders(plans)
    made = Request(
        found, tuple(texts), tuple(given), rounds, batch, tuple(sizes) or ((),), dict(call or {}), level, floor, **rest
    )
    device = getattr(pipe, "device", None)
    if made.clock is time.process_time and getattr(device, "type", "cpu") != "cpu":
        raise InvalidOptionError(f"{verb}: CPU seconds say nothing of a pipeline on {device}: use the wall clock")
    for size in made.sizes:
        require_call(pipe, made.at(size), verb)
    for one in found:
        if one.accelerated:
            _require(pipe, one, verb)
    return made


def _require(pipe: Any, one: Contender, verb: str) -> None:
    """Refuse a plan that cannot be made or switches nothing on: it would be the baseline under another name."""
    decided = plan(pipe, one.preset, **one.overrides)
    if not decided.enabled:
        why = next((item.reason for item in decided.items if item.status != "enabled"), "it names nothing")
        raise InvalidOptionError(f"{verb}: plan {clipped(one.name)!r} switches nothing on: {clipped(why, 150)}")
