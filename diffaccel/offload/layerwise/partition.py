"""Which blocks stay on the device and which take turns. Pure: sizes in, indices and bytes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import BudgetError


@dataclass(frozen=True)
class Partition:
    """A division of the blocks.

    Attributes:
        kept: indices of the blocks that stay.
        moving: indices of those that take turns.
        buffer_bytes: size of one buffer, that of the largest block that moves.
        buffers: how many there are (`prefetch + 1`, or fewer blocks).
        resident_bytes: all that is on the device at once: kept, shared and buffers.
        moved_bytes: what one pass over all blocks brings in.
    """

    kept: tuple[int, ...]
    moving: tuple[int, ...]
    buffer_bytes: int
    buffers: int
    resident_bytes: int
    moved_bytes: int


def spread(count: int, among: int) -> tuple[int, ...]:
    """`count` of `among` indices, evenly, 0 first.

    Evenly, because a kept block gives the transfers time to get ahead; 0 first, because caches run the first block
    in every step.
    """
    return tuple(i * among // count for i in range(count)) if count else ()


def divide(sizes: Sequence[int], shared_bytes: int, kept: int, prefetch: int) -> Partition:
    """`kept` blocks stay, the others take turns in `prefetch + 1` buffers."""
    stay = set(spread(min(kept, len(sizes)), len(sizes)))
    moving = tuple(i for i in range(len(sizes)) if i not in stay)
    buffer_bytes = max((sizes[i] for i in moving), default=0)
    buffers = min(prefetch + 1, len(moving))
    resident = sum(sizes[i] for i in stay) + shared_bytes + buffers * buffer_bytes
    moved = sum(sizes[i] for i in moving)
    return Partition(tuple(sorted(stay)), moving, buffer_bytes, buffers, resident, moved)


def by_layers(sizes: Sequence[int], shared_bytes: int, resident_layers: int, prefetch: int) -> Partition:
    """At most `resident_layers + prefetch` blocks at once, the one that computes among the resident ones."""
    if resident_layers + prefetch >= len(sizes):
        return divide(sizes, shared_bytes, len(sizes), prefetch)
    return divide(sizes, shared_bytes, resident_layers - 1, prefetch)


def by_bytes(sizes: Sequence[int], shared_bytes: int, max_bytes: int, prefetch: int) -> Partition:
    """As many blocks stay as `max_bytes` allow. Raises BudgetError with the least that is possible."""
    for kept in range(len(sizes), -1, -1):
        found = divide(sizes, shared_bytes, kept, prefetch)
        if found.resident_bytes <= max_bytes:
            return found
    least = divide(sizes, shared_bytes, 0, 0).resident_bytes
    given = divide(sizes, shared_bytes, 0, prefetch).resident_bytes
    raise BudgetError(
        f"max_bytes={max_bytes}: one block at a time needs {least} bytes (prefetch=0), and prefetch={prefetch} needs "
        f"{given}"
    )
