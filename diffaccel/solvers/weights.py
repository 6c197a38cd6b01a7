"""Weights that integrate the polynomial through unequally spaced nodes: the mathematics of Adams' methods."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..extrapolation.newton import newton_weights

# Gauss-Legendre with three points on [-1, 1]: exact on polynomials up to degree 5, so up to six nodes.
POINTS = ((-math.sqrt(0.6), 5 / 18), (0.0, 8 / 18), (math.sqrt(0.6), 5 / 18))


def integral_weights(nodes: Sequence[float], start: float, end: float) -> list[float]:
    """w with sum_k w_k f(node_k) = the integral from `start` to `end` of the polynomial through (node_k, f(node_k)).

    One to six nodes, all different, in any order. Beyond the newest node it is a variable-step Adams-Bashforth
    formula, up to the newest one Adams-Moulton's (Hairer, Norsett and Wanner, Solving Ordinary Differential Equations
    I, III.5). The weights sum to end - start.
    """
    length = end - start
    if len(nodes) == 1:
        return [length]  # bit-equal to Euler's step
    total = [0.0] * len(nodes)
    for point, share in POINTS:
        for k, value in enumerate(newton_weights(nodes, start + length * (1 + point) / 2)):
            total[k] += length * share * value
    return total
