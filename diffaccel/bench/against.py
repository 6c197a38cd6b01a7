"""A measurement against a stored one: what is worse by more than the intervals explain. Pure, on documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidOptionError
from ..quality.bootstrap import bootstrap
from ..quality.judgement import CAP_DB, DECIBELS

# Figure -> how much worse is nothing to speak of, whatever the interval says. Speed is a share, the others are units.
MARGINS = {"speed": 0.03, "psnr": 0.1, "ms_ssim": 0.001, "score": 0.01, "computed steps": 0.25}
_FIDELITY = ("psnr", "ms_ssim", "score")


@dataclass(frozen=True)
class Change:
    """One figure of one contender: `delta` is now - before (speed: as a share), `half` half the width of its interval.
    `worse`: a regression beyond the interval and the margin."""

    size: str
    contender: str
    figure: str
    before: float | None
    now: float | None
    delta: float
    half: float
    worse: bool

    def __str__(self) -> str:
        word = "REGRESSION" if self.worse else "as before" if abs(self.delta) <= self.half else "changed"
        shown = " -> ".join("-" if value is None else f"{value:.4g}" for value in (self.before, self.now))
        return f"{word}: {self.contender} at {self.size}: {self.figure} {shown} ({self.delta:+.3g} +- {self.half:.2g})"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Change, ...]:
    """Every figure that both documents have, regressions first.

    Speed is the ratio to the plain pipeline of the same document, so that machines may differ (but not the kind of
    clock); its two intervals add up as roots of squares. Fidelity and computed steps are paired by prompt where both
    ran the same prompts and seeds. A contender that ran before and fails now, and pictures that broke, are
    regressions. Raises InvalidOptionError where the documents have no contender in common.
    """
    alike = all(before.get(key) == now.get(key) for key in ("prompts", "seeds", "call"))
    level = float(now.get("level", 0.9))
    found = [change for pair in _pairs(before, now) for change in _of(*pair, alike, level)]
    if before.get("clock") != now.get("clock"):
        found = [change for change in found if change.figure != "speed"]
    if not found:
        raise InvalidOptionError(
            "the stored document has no size and plan in common with this one: nothing to compare"
        )
    return tuple(sorted(found, key=lambda change: not change.worse))


def _pairs(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    stored = {(b["size"], one["name"]): one for b in before["buckets"] for one in b["contenders"]}
    for bucket in now["buckets"]:
        for one in bucket["contenders"]:
            old = stored.get((bucket["size"], one["name"]))
            if old is not None and not old["refused"]:
                yield bucket["size"], old, one


def _of(size: str, old: Mapping[str, Any], new: Mapping[str, Any], alike: bool, level: float) -> Iterator[Change]:
    name = new["name"]
    if new["refused"]:
        yield Change(size, name, "runs", 1, 0, -1, 0, True)
        return
    if not new["baseline"]:
        yield _speed(size, name, old["speed"], new["speed"])
        for metric in _FIDELITY:
            if metric in old["quality"] and metric in new["quality"]:
                yield _fidelity(size, name, metric, old, new, alike, level)
        yield _steps(size, name, old["computed"], new["computed"], alike, level)
    broke = sum(map(bool, new["faults"])) - sum(map(bool, old["faults"]))
    if broke:
        yield Change(size, name, "broken pictures", None, None, broke, 0, broke > 0)


def _speed(size: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    """Ratios are compared as logarithms: twice as fast and half as fast are as far from even."""
    delta = math.log(new["median"] / old["median"])
    half = math.hypot(*(_half([math.log(max(end, 1e-9)) for end in side["interval"]]) for side in (old, new)))
    worse = delta < -max(half, MARGINS["speed"])
    return Change(size, name, "speed", old["median"], new["median"], math.expm1(delta), math.expm1(half), worse)


def _fidelity(
    size: str, name: str, metric: str, old: Mapping[str, Any], new: Mapping[str, Any], alike: bool, level: float
) -> Change:
    was, is_now = (_each(side, metric) for side in (old, new))
    return _change(size, name, metric, was, is_now, alike, level, sign=1)


def _steps(size: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any], alike: bool, level: float) -> Change:
    return _change(size, name, "computed steps", old["each"], new["each"], alike, level, sign=-1)


def _change(
    size: str, name: str, figure: str, was: Sequence[float], now: Sequence[float], alike: bool, level: float, sign: int
) -> Change:
    """`sign` 1: more is better."""
    if alike and len(was) == len(now):
        found = bootstrap([b - a for a, b in zip(was, now, strict=True)], level)
        delta, half = found.mean, _half([found.low, found.high])
    else:
        sides = [bootstrap(side, level) for side in (was, now)]
        delta = sides[1].mean - sides[0].mean
        half = math.hypot(*(_half([side.low, side.high]) for side in sides))
    means = [sum(side) / len(side) for side in (was, now)]
    worse = sign * delta < -max(half, MARGINS[figure])
    return Change(size, name, figure, means[0], means[1], delta, half, worse)


def decibels(one: Mapping[str, Any]) -> list[float]:
    """PSNR of a contender per prompt: identical pictures count as 100 dB, broken ones as 0."""
    return _each(one, "psnr")


def _each(one: Mapping[str, Any], metric: str) -> list[float]:
    """Per prompt. JSON has no number for identical pictures, nor for broken ones."""
    perfect = CAP_DB if metric in DECIBELS else 1.0
    values = one["quality"][metric]["each"]
    faults = one["faults"] or [None] * len(values)
    return [
        (0.0 if fault == "nan" else perfect) if value is None else min(value, CAP_DB)
        for value, fault in zip(values, faults, strict=True)
    ]


def _half(ends: Sequence[float]) -> float:
    return (ends[1] - ends[0]) / 2 if ends else 0.0
