"""`bench`: several plans on one pipeline, in turn, with fidelity, speed and the noise floor in one document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..quality.judgement import Judgement
from .arena import Arena, Clock
from .environment import environment
from .figures import figures, judgement, leads
from .floor import floor as floor_of
from .floor import lowest
from .request import LEVEL, Request, Score, Size, request
from .result import Result
from .tally import Tally, bucket

SCHEMA = 1


def bench(
    pipe: Any,
    plans: object,
    prompts: object,
    *,
    seeds: int | Sequence[int] = 0,
    rounds: int = 10,
    batch: int = 1,
    sizes: Sequence[Size] = (),
    level: float = LEVEL,
    floor: int = 2,
    score: Score | None = None,
    clock: Clock = time.perf_counter,
    say: Callable[[str], object] = lambda line: None,
    **call: Any,
) -> Result:
    """Measure plans beside the plain pipeline: speed, fidelity, steps, stages, memory.

    Args:
        pipe: a diffusers pipeline that takes a prompt; afterwards as before, with whatever was on.
        plans: wishes, or {name: wish}; see `contender.contenders`. The plain pipeline is always among them.
        prompts: one or several; round r runs prompt r, and those that no round comes to run once for their pictures.
        seeds: one per prompt, or the first one.
        rounds: of A B B A, after a first run of each that is told apart.
        batch: prompts per call of the rounds for throughput; with 1 it is read off the latency.
        sizes: (width, height) or (width, height, frames) of each bucket; the pipeline's own unless given.
        level: probability of the intervals.
        floor: prompts on which the noise floor is taken; 0: none.
        score: how well a picture [C, H, W] (video [F, C, H, W]) shows its prompt, in 0..1.
        clock: seconds; `time.process_time` counts those of this process on CPUs that other jobs share (not on a GPU).
        call: the pipeline's own arguments.

    Raises InvalidOptionError for bad input before anything runs. A plan that fails in its first run is reported with
    what it said, and the others go on.
    """
    asked = request(
        pipe, plans, prompts, seeds=seeds, rounds=rounds, batch=batch, sizes=sizes, call=call, level=level,
        floor=floor, score=score, clock=clock, say=say,
    )  # fmt: skip
    return run(pipe, asked)


def run(pipe: Any, asked: Request) -> Result:
    """Carry out a checked request."""
    buckets, pictures = [], {}
    began = environment()
    with Arena(pipe, asked.clock) as arena:
        for size in asked.sizes:
            tallies = bucket(arena, asked, size)
            arena.clear()
            baseline = next(tally for tally in tallies if tally.contender.is_baseline)
            name = "x".join(map(str, size)) or shape_name(baseline)
            judged = {t.contender.name: judgement(asked, t, baseline) for t in tallies if t.refusal is None}
            others = {who: one for who, one in judged.items() if who != baseline.contender.name}
            contenders = [figures(asked, t, baseline, judged.get(t.contender.name)) for t in tallies]
            floor = _floor(arena, asked, size, baseline)
            buckets.append({"size": name, "contenders": contenders, "leads": leads(others), "floor": floor})
            pictures[name] = {t.contender.name: t.pictures() for t in tallies if t.refusal is None}
    document = {
        "schema": SCHEMA,
        "pipeline": type(pipe).__name__,
        "dtype": _dtype(pipe),
        "prompts": list(asked.prompts),
        "seeds": list(asked.seeds),
        "call": {name: _plain(value) for name, value in asked.call.items()},
        "rounds": asked.rounds,
        "batch": asked.batch,
        "level": asked.level,
        "clock": "cpu" if asked.clock is time.process_time else "wall",
        "environment": {**began, "load_after": environment()["load"]},
        "buckets": buckets,
    }
    return Result(document, pictures)


def shape_name(baseline: Tally) -> str:
    """Width x height (x frames) of the baseline's pictures."""
    *_, height, width, _ = baseline.pictures().shape
    frames = baseline.pictures().shape[1:-3]
    return "x".join(map(str, (width, height, *frames)))


def _floor(arena: Arena, asked: Request, size: Size, baseline: Tally) -> dict[str, Any]:
    """The noise floor by each way, and the one that counts."""
    count = min(asked.floor, len(asked.prompts))
    if not count:
        return {}
    asked.say("noise floor")
    prompts, seeds = asked.prompts[:count], asked.seeds[:count]
    ways = floor_of(arena.pipe, prompts, seeds, asked.at(size), baseline.pictures(), asked.level)
    low = lowest(ways)
    told = {name: way.summary() if isinstance(way, Judgement) else {"refused": way} for name, way in ways.items()}
    return {"prompts": count, "ways": told, "quality": {} if low is None else low.summary()}


def _dtype(pipe: Any) -> str | None:
    parts = [getattr(pipe, name, None) for name in ("transformer", "unet")]
    found = [part.dtype for part in parts if isinstance(part, torch.nn.Module) and hasattr(part, "dtype")]
    return str(found[0]).removeprefix("torch.") if found else None


def _plain(value: object) -> object:
    """What JSON has a word for; of a picture or tensor its type, as addresses would differ from run to run."""
    return value if isinstance(value, str | int | float | bool | None) else f"<{type(value).__name__}>"
