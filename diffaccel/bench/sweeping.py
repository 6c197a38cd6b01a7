"""`sweep`: any one parameter of `accelerate`, from careful to bold, beside what simply fewer steps give."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..api import plan
from ..errors import InvalidOptionError, clipped, unknown
from ..tune.rivals import schedulers
from .arena import Arena, Clock
from .contender import Contender, contenders
from .contest import run
from .curve import AXES, Curve, points_of
from .hits import computed_steps
from .request import LEVEL, Request, Score, request

FEWER = 6  # numbers of steps of each rival, at most
_FAULTS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def sweep(
    pipe: Any,
    parameter: str,
    values: Sequence[Any],
    prompts: object,
    *,
    base: object = None,
    seeds: int | Sequence[int] = 0,
    rounds: int = 3,
    axis: str = "speed",
    level: float = LEVEL,
    floor: int = 1,
    score: Score | None = None,
    clock: Clock = time.perf_counter,
    say: Callable[[str], object] = lambda line: None,
    **call: Any,
) -> Curve:
    """Speed and fidelity at every value of one parameter.

    Args:
        pipe: a diffusers pipeline that takes a prompt; afterwards as before.
        parameter: an override of `accelerate` ("cache_threshold", "level", ...), or "steps".
        values: what it is set to, two or more.
        base: the wish that it is added to (see `contender.contenders`), e.g. "cache=first_block".
        axis: "speed" (plain seconds / seconds) or "computed" (share of steps left out, where a clock means nothing).
        rounds, seeds, level, floor, score, clock, call: as for `bench`.

    Fewer steps are always among the points, at as many evaluations as the values came to: of the pipeline's own
    scheduler, of Euler where that is another, and of this package's solver where it can act.
    Raises InvalidOptionError for bad input before anything runs.
    """
    if axis not in AXES:
        raise unknown("axis", str(axis), AXES)
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) < 2:
        raise InvalidOptionError(f"sweep: {clipped(str(parameter))} needs two or more values, got {values!r:.60}")
    ours = {f"{parameter}={value}": _with(base, parameter, value) for value in values}
    asked: dict[str, Any] = {
        "seeds": seeds, "rounds": rounds, "level": level, "floor": floor, "call": call, "score": score, "clock": clock,
        "say": say, "verb": "sweep",
    }  # fmt: skip
    probe = request(pipe, ours, prompts, **asked)  # everything is checked before anything runs
    counts = _counts(pipe, probe, whole := steps_of(pipe, call))
    fewer_is_all = not any(one.accelerated for one in probe.contenders)  # the sweep is of steps themselves
    rivals = {} if fewer_is_all else _rivals(pipe, counts, whole)
    result = run(pipe, request(pipe, {**ours, **rivals}, prompts, **asked))
    series: dict[str, tuple[str, Any]] = {f"{parameter}={value}": (parameter, value) for value in values}
    series |= {name: (name.partition(",")[0], wish["steps"]) for name, wish in rivals.items()}
    points, refused = points_of(result, series)
    return Curve(parameter, tuple(points), result, axis, refused)


def steps_of(pipe: Any, call: Mapping[str, Any]) -> int:
    """Steps of the plain run: those given, or the pipeline's own."""
    default = inspect.signature(type(pipe).__call__).parameters.get("num_inference_steps")
    return int(call.get("num_inference_steps") or (default.default if default is not None else 0))


def _with(base: object, parameter: str, value: Any) -> dict[str, Any]:
    """The wish with one thing set."""
    one = contenders([base])[-1]  # behind the plain pipeline, or that itself
    known = {"preset": one.preset, "steps": one.steps}
    return {**one.overrides, **{name: what for name, what in known.items() if what is not None}, parameter: value}


def _counts(pipe: Any, probe: Request, whole: int) -> list[int]:
    """Numbers of steps for rivals: what the values compute on the first prompt, thinned out to a few."""
    found = set()
    with Arena(pipe, probe.clock) as arena:
        for one in probe.contenders:
            if one.accelerated:
                probe.say(f"trying {one.name}")
                found |= _tried(arena, one, probe)
    inner = sorted(count for count in found if 1 <= count < whole) or [max(1, whole // 2)]
    last = len(inner) - 1
    return inner if last < FEWER else sorted({inner[round(i * last / (FEWER - 1))] for i in range(FEWER)})


def _tried(arena: Arena, one: Contender, probe: Request) -> set[int]:
    """Computed steps of one run; none where it fails, which the measurement then reports."""
    try:
        report = arena.lap(one, probe.prompts[:1], probe.seeds[:1], probe.at(())).report
    except _FAULTS:
        arena.clear()
        return set()
    return set() if report is None else {round(computed_steps(report))}


def _rivals(pipe: Any, counts: Sequence[int], whole: int) -> dict[str, dict[str, Any]]:
    """Name -> wish of fewer steps by the pipeline's scheduler, by Euler's, and by our solver where it can act."""
    rivals: dict[str, dict[str, Any]] = {}
    own = "own scheduler" if "euler" in schedulers(pipe.scheduler) else "Euler"
    solver = "solver.abm" in plan(pipe, None, solver="abm").enabled  # some schedulers it cannot stand in for
    for count in counts:
        rivals[f"{own},steps={count}"] = {"steps": count}
        if own != "Euler":
            rivals[f"Euler,steps={count}"] = {"scheduler": "euler", "steps": count}
        if solver:
            rivals[f"abm solver,steps={count}"] = {"solver": "abm", "steps": count}
    return rivals
