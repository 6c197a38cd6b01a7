"""Whose turn it is: A B B A, so that a machine that gets warmer or busier slows all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def turns(count: int, rounds: int) -> Iterator[tuple[int, int]]:
    """(round, contender) of every run: in each round all of them forwards and then backwards.

    A drift that is linear over a round adds the same to everyone's mean of the two runs. A contender that ends one
    round begins the next, so it stays on.
    """
    for number in range(rounds):
        yield from ((number, one) for one in range(count))
        yield from ((number, one) for one in reversed(range(count)))


def ratios(baseline: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> list[float]:
    """Per round baseline seconds / our seconds, each the sum of the round's runs; above 1 is faster."""
    return [sum(one) / sum(other) for one, other in zip(baseline, ours, strict=True)]
