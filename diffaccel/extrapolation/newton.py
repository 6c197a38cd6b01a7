"""Weights of the interpolating polynomial (Newton's divided differences), for any spacing of the nodes."""

from __future__ import annotations

from collections.abc import Sequence


def newton_weights(coordinates: Sequence[float], at: float) -> list[float]:
    """Newton's divided differences: exact on polynomials of degree < n for any spacing of the n coordinates.

    The interpolating polynomial is unique, so its weights are written in Lagrange's form,
    w_k = prod_{j != k} (at - c_j) / (c_k - c_j). vLLM-Omni's SeaCache extrapolates the same polynomial at order 1.
    """
    weights = []
    for k, own in enumerate(coordinates):
        weight = 1.0
        for j, other in enumerate(coordinates):
            if j != k:
                weight *= (at - other) / (own - other)
        weights.append(weight)
    return weights
