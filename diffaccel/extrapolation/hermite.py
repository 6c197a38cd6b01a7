"""HiCache's basis: the ladder under contracted Hermite polynomials."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .ladder import mixed, rungs


def hermite_weights(coordinates: Sequence[float], at: float, sigma: float = 0.5) -> list[float]:
    """HiCache: the ladder's F_k with contracted Hermite polynomials, F_0 + sum_k F_k s^k H_k(s d) / k!.

    H_k are the physicists' polynomials and s = `sigma`. At s = 0.5 the linear term is half of Taylor's, and order 2
    adds a constant -s^2 F_2. Source: HiCache (arXiv 2508.16984); s = 0.5 published there.
    """
    distance = at - coordinates[-1]
    factors = [1.0] + [
        sigma**k * hermite_polynomial(k, sigma * distance) / math.factorial(k) for k in range(1, len(coordinates))
    ]
    return mixed(rungs(coordinates), factors)


def hermite_polynomial(degree: int, x: float) -> float:
    """The physicists' H_n(x): H_0 = 1, H_1 = 2x, H_{n+1} = 2x H_n - 2n H_{n-1}."""
    before, now = 0.0, 1.0
    for n in range(degree):
        before, now = now, 2 * x * now - 2 * n * before
    return now
