"""What the demo compares: every level of the dial, and at as many computed steps the two things it has to beat, simply
fewer steps and diffusers' own first-block cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .rounds import PLAIN, Strength, measure

# Thresholds of diffusers' cache that are tried, on one prompt, for one that computes about as many steps as a level.
THRESHOLDS = (0.04, 0.06, 0.08, 0.1, 0.115, 0.13, 0.15, 0.2, 0.28, 0.4)
FEWER, PEER = "{level}: fewer steps", "{level}: diffusers"


def runs(levels: Sequence[str], rounds: int) -> int:
    """How many runs a contest takes, with what goes before it."""
    return len(levels) + len(THRESHOLDS) + rounds * (1 + 3 * len(levels))


def settle(
    pipe: Any,
    prompts: Sequence[str],
    call_kwargs: Mapping[str, Any],
    *,
    preset: str,
    levels: Sequence[str],
    steps: int,
    seed: int,
    tick: Callable[[], object],
) -> tuple[Strength, ...]:
    """Plain, then for each level: fewer steps, diffusers' first-block cache, ours. Runs each level once, which warms
    up, to see how many steps it computes, and each threshold once on the first prompt."""
    common: dict[str, Any] = {"steps": steps, "rounds": 0, "seed": seed, "tick": tick}
    ours = [Strength(level, preset, {"level": level}) for level in levels]
    computed = [outcome.mean_computed for outcome in measure(pipe, prompts, call_kwargs, strengths=ours, **common)]
    tried = [Strength(f"{value:g}", threshold=value) for value in THRESHOLDS]
    peers = measure(pipe, prompts[:1], call_kwargs, strengths=tried, **common)
    counts = {value: peer.mean_computed for value, peer in zip(THRESHOLDS, peers, strict=True)}
    found: list[Strength] = [PLAIN]
    for strength, count in zip(ours, computed, strict=True):
        fewer = Strength(FEWER.format(level=strength.name), steps=max(1, round(count)))
        peer = Strength(PEER.format(level=strength.name), threshold=nearest(counts, count))
        found += [fewer, peer, strength]
    return tuple(found)


def nearest(counts: Mapping[float, float], count: float) -> float:
    """The threshold that computes nearest to `count` steps; of two that are as near, the one that computes more."""
    return min(counts, key=lambda value: (abs(counts[value] - count), -counts[value]))
