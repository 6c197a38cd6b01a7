"""What contenders did at one size: first runs, rounds in turn, the remaining prompts, batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DiffaccelError
from .arena import Arena, Lap
from .contender import Contender
from .request import Request, Size
from .turns import turns

_FAULTS = (DiffaccelError, RuntimeError, MemoryError)  # of a run: no room, a kernel that is missing
_SETTLES = ("compile",)  # items whose first run after being put on is not like the others


@dataclass
class Tally:
    """One contender at one size. `rounds`: seconds of the two runs of each round, one prompt at a time; `batches`: the
    same of a whole batch; `laps`: per prompt its first run; `watched`: a run whose report says what the others do not.
    `same` is False where two runs of one prompt and seed gave other pictures."""

    contender: Contender
    first: Lap | None = None
    rounds: list[list[float]] = field(default_factory=list)
    batches: list[list[float]] = field(default_factory=list)
    laps: dict[int, Lap] = field(default_factory=dict)
    watched: Lap | None = None
    same: bool = True
    refusal: str | None = None
    attach_s: float = 0.0
    weights_bytes: int = 0

    @property
    def shown(self) -> Lap | None:
        """The lap whose report and plan are told."""
        return self.watched or next(iter(self.laps.values()), None)

    def pictures(self) -> np.ndarray:
        """[P, ...] of all prompts, in their order."""
        return np.concatenate([self.laps[at].pictures for at in sorted(self.laps)])


def bucket(arena: Arena, asked: Request, size: Size) -> list[Tally]:
    """Every contender at one size. One that fails keeps what was said and takes no part; the baseline may not fail."""
    call, tallies = asked.at(size), [Tally(one) for one in asked.contenders]
    for tally in tallies:
        asked.say(f"first run of {tally.contender.name}")
        _begin(arena, asked, tally, call)
    running = [tally for tally in tallies if tally.refusal is None]
    for number, at in turns(len(running), asked.rounds):
        if at == 0 and len(running[0].rounds) == number:
            asked.say(f"round {number + 1} of {asked.rounds}")
        _latency(arena, asked, running[at], number, call)
    for prompt in range(len(asked.prompts)):  # those that no round came to: for their pictures
        for tally in running:
            if prompt not in tally.laps:
                tally.laps[prompt] = _lap(arena, asked, tally, [prompt], call)
    if asked.batch > 1:
        for number, at in turns(len(running), asked.rounds):
            _throughput(arena, asked, running[at], number, call)
    return tallies


def _begin(arena: Arena, asked: Request, tally: Tally, call: Mapping[str, Any]) -> None:
    """The first run apart, which warms up and compiles; then one whose steps and stages are seen."""
    one, name = tally.contender, tally.contender.name
    try:
        arena.put(one)
        tally.attach_s = arena.attach_s[name][-1] if one.accelerated else 0.0
        tally.weights_bytes = _weights(arena.pipe)
        tally.first = _lap(arena, asked, tally, [0], call)
        if not one.accelerated:
            tally.watched = arena.lap(one, asked.prompts[:1], asked.seeds[:1], call, watched=True)
    except _FAULTS as error:
        if one.is_baseline:
            raise
        arena.clear()
        tally.refusal = " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _latency(arena: Arena, asked: Request, tally: Tally, number: int, call: Mapping[str, Any]) -> None:
    prompt = number % len(asked.prompts)
    lap = _lap(arena, asked, tally, [prompt], call)
    if len(tally.rounds) == number:
        tally.rounds.append([])
    tally.rounds[number].append(lap.seconds)
    before = tally.laps.setdefault(prompt, lap)
    tally.same &= np.array_equal(before.pictures, lap.pictures, equal_nan=True)


def _throughput(arena: Arena, asked: Request, tally: Tally, number: int, call: Mapping[str, Any]) -> None:
    prompts = [(number * asked.batch + i) % len(asked.prompts) for i in range(asked.batch)]
    if not tally.batches:
        _lap(arena, asked, tally, prompts, call)  # other shapes: kernels are chosen, graphs compiled
    if len(tally.batches) == number:
        tally.batches.append([])
    tally.batches[number].append(_lap(arena, asked, tally, prompts, call).seconds)


def _lap(arena: Arena, asked: Request, tally: Tally, prompts: Sequence[int], call: Mapping[str, Any]) -> Lap:
    texts, seeds = [asked.prompts[i] for i in prompts], [asked.seeds[i] for i in prompts]
    plan = None if tally.first is None else tally.first.plan
    if arena.put(tally.contender) and plan is not None and any(name in _SETTLES for name in plan.enabled):
        arena.lap(tally.contender, texts, seeds, call)  # compiled graphs are looked up again
    return arena.lap(tally.contender, texts, seeds, call)


def _weights(pipe: Any) -> int:
    """Bytes of all parameters and buffers of the pipeline's modules, each counted once."""
    seen: dict[int, int] = {}
    for part in getattr(pipe, "components", {}).values():
        for tensor in (*part.parameters(), *part.buffers()) if hasattr(part, "parameters") else ():
            seen[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(seen.values())
