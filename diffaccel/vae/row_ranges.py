"""Arithmetic of row strips: which rows of its input a strip of a convolution's output needs. Plain numbers.

Rows are half-open ranges [first, end) of a map of `height` rows. A range with its halo is clipped to the map: where
it ends at the map's edge the layer's own zero padding is right, and where it does not the rows that the padding spoilt
are cut off again.
"""

from __future__ import annotations

import itertools

Rows = tuple[int, int]


def strips(height: int, rows: int) -> list[Rows]:
    """`height` rows in as few strips of at most `rows` as possible, all nearly of one height."""
    count = -(-height // rows)
    edges = [height * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def tallest(height: int, rows: int) -> int:
    """Rows of the tallest of these strips."""
    count = -(-height // rows)
    return -(-height // count)


def with_halo(rows: Rows, reach: int, height: int) -> Rows:
    """The rows that a layer reaching `reach` rows up and down needs for these rows of its output (stride 1)."""
    return max(rows[0] - reach, 0), min(rows[1] + reach, height)


def below_doubling(rows: Rows, height: int) -> Rows:
    """The rows before a doubling (nearest) that hold these rows after it; `height` is that before."""
    return max(rows[0] // 2, 0), min(-(-rows[1] // 2), height)


def below_halving(rows: Rows, height: int) -> Rows:
    """The rows that a 3x3 convolution of stride 2, padded below by one row only, needs for these of its output."""
    return 2 * rows[0], min(2 * rows[1] + 1, height)


def halved(size: int) -> int:
    """Rows (or columns) behind such a convolution."""
    return size // 2
