"""Which points of a curve are worth choosing. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices, by falling gain, of the points (gain, quality) that none other equals or beats in both.

    Of points that are equal in both, the first stays. More is better on both axes.
    """
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i))
    front: list[int] = []
    for at in order:
        if not front or points[at][1] > points[front[-1]][1]:
            front.append(at)
    return front
