"""TaylorSeer's ladder of differences, each divided by the last gap alone."""

from __future__ import annotations

import math
from collections.abc import Sequence


def rungs(coordinates: Sequence[float]) -> list[list[float]]:
    """Row k: weights of the k-th rung F_k at the newest coordinate, with F_k = (F_{k-1} - F_{k-1}^old) / last gap."""
    count = len(coordinates)
    rung = [[float(i == j) for j in range(count)] for i in range(count)]  # rung[i]: weights of f_i
    rows = [rung[-1]]
    for k in range(1, count):
        gaps = [coordinates[i] - coordinates[i - 1] for i in range(k, count)]
        rung = [
            [(n - o) / gap for n, o in zip(new, old, strict=True)]
            for new, old, gap in zip(rung[1:], rung[:-1], gaps, strict=True)
        ]
        rows.append(rung[-1])
    return rows


def mixed(rows: list[list[float]], factors: Sequence[float]) -> list[float]:
    """One weight per coordinate: sum_k factors[k] rows[k]."""
    return [sum(f * row[j] for f, row in zip(factors, rows, strict=True)) for j in range(len(rows[0]))]


def ladder_weights(coordinates: Sequence[float], at: float) -> list[float]:
    """TaylorSeer's ladder: sum_k F_k d^k / k!, d = at - newest, every F_k divided by the last gap only.

    Agrees with Newton up to order 1; from order 2 on, or with irregular gaps, it is not the Taylor polynomial.
    Source: TaylorSeer (arXiv 2503.06923), as its code and cache-dit, ParaAttention and diffusers all compute it.
    """
    distance = at - coordinates[-1]
    return mixed(rungs(coordinates), [distance**k / math.factorial(k) for k in range(len(coordinates))])
