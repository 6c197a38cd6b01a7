"""Have these bytes changed? A checksum of all of them, at the speed of memory and where they are."""

from __future__ import annotations

import torch

_COLUMNS = 4096  # words a row of the table


def checksum(data: torch.Tensor) -> tuple[int, int]:
    """Two 64-bit sums of bytes [n] (uint8, any device); a change of any one word changes both.

    The words make a table; rows and columns are summed, and the sums weighed by odd numbers, so that words that
    changed places show as well. Made to notice edits, not to withstand forgers.
    """
    data = data.clone() if data.storage_offset() % 8 else data
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    rows = words.numel() // _COLUMNS
    table, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    tail = _weigh(data[whole:].to(torch.int64))
    first = _weigh(table.sum(0)) + _weigh(rest) + 5 * tail
    second = _weigh(table.sum(1)) + rest.sum() + 7 * tail
    return int(first), int(second)


def _weigh(sums: torch.Tensor) -> torch.Tensor:
    """The sum of int64 [n], each weighed by an odd number of its own (wraps around)."""
    places = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64)
    return (sums * (places * 0x1E3779B97F4A7C15 | 1)).sum()


def spread(count_bytes: int, count: int = 8) -> range:
    """Offsets of at most `count` looks into so many bytes, at multiples of 8, from the first on."""
    step = max(8, count_bytes // count // 8 * 8)
    return range(0, min(count_bytes, step * count), step)
