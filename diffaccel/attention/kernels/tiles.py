"""How the Triton kernels are cut on each GPU architecture. Data only.

Every row was compiled for its architecture and its shared memory compared with the limit
(tests/attention/test_ptx.py); none was timed: no GPU was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

# Most shared memory one thread block may ask for, by compute capability: NVIDIA's tuning guides for Ampere, Ada,
# Hopper and Blackwell.
SHARED_BYTES = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
LOWEST = (8, 0)  # below, Triton finds no tensor cores for these kernels


@dataclass(frozen=True)
class Tile:
    """Rows of queries and of keys per step, warps, and steps of keys in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


# Two steps of 16-bit keys and values in flight need three stages, and go into 99 KB; of float32 they do not.
_HALF = {"two_bytes": Tile(128, 64, 8, 3), "four_bytes": Tile(64, 32, 4, 2), "int8": Tile(128, 64, 8, 3)}
_WIDE = _HALF | {"int8_four_bytes": Tile(128, 64, 8, 3)}
_SMALL = _HALF | {"int8_four_bytes": Tile(128, 64, 8, 2)}

# By compute capability. "int8" is the 8-bit kernel, the others are the block-sparse one; the bytes are those of a
# number (of V in the 8-bit kernel).
TILES: dict[tuple[int, int], dict[str, Tile]] = {
    (8, 0): _WIDE,
    (8, 6): _SMALL,
    (8, 9): _SMALL,
    (9, 0): _WIDE,
    (10, 0): _WIDE,
    (12, 0): _SMALL,
}


def tile(kind: str, capability: tuple[int, int] | None) -> Tile:
    """The cut for a kernel on an architecture; one that is not in the table takes the next lower one of the table.

    `capability` of None (the interpreter on a CPU) takes the smallest.
    """
    known = [c for c in sorted(TILES) if capability is None or c <= capability]
    if capability is None or not known:
        return TILES[(8, 6)][kind]
    return TILES[known[-1]][kind]
