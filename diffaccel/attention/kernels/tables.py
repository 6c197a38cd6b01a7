"""A block plan as the flat lists that the Triton kernel walks: tiles of queries, and tiles of keys per row.

Neighbouring key blocks are joined to runs before they are cut into tiles, so that small or uneven blocks (clusters)
still fill the tiles of the kernel.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from ..plan import BlockPlan, HeadPlans


@dataclass(frozen=True)
class Tables:
    """What the kernel reads, on the device of the queries; all int32.

    Attributes:
        rows: [query tiles, 4]: first position, end position, first and end index into `keys`.
        keys: [key tiles, 2]: first position and end position; never empty, at most `tile_keys` long, and a row's
            tiles do not overlap.
        plans: [P, 2]: first query tile and number of query tiles of every plan.
        assign: [B*H]: plan of every head.
        query_order, key_order: [P, N] token at each position; None where no plan has an order.
        longest: query tiles of the plan that has most.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    plans: torch.Tensor
    assign: torch.Tensor
    query_order: torch.Tensor | None
    key_order: torch.Tensor | None
    longest: int


def _cut(first: torch.Tensor, end: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(index of the interval, first, end) of every tile when intervals [n] are cut into tiles."""
    count = (end - first + tile - 1) // tile
    of = torch.repeat_interleave(torch.arange(len(first)), count)
    within = torch.arange(len(of)) - (count.cumsum(0) - count)[of]
    begin = first[of] + within * tile
    return of, begin, torch.minimum(begin + tile, end[of])


def key_tiles(plan: BlockPlan, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([query blocks + 1] row pointers, [T, 2] first and end position) of the key tiles of every row."""
    row = torch.repeat_interleave(torch.arange(plan.queries.count), plan.indptr.diff().long())
    starts, blocks = plan.keys.starts.long(), plan.indices.long()
    first, end = starts[blocks], starts[blocks + 1]
    there = end > first  # clusters may be empty
    row, first, end = row[there], first[there], end[there]
    opens = torch.ones(len(row), dtype=torch.bool)
    opens[1:] = (row[1:] != row[:-1]) | (first[1:] != end[:-1])
    closes = opens.roll(-1)
    of, begin, stop = _cut(first[opens], end[closes], tile)
    counts = torch.bincount(row[opens][of], minlength=plan.queries.count)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)), torch.stack((begin, stop), 1)


def query_tiles(plan: BlockPlan, tile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query block, first, end position) of every tile of queries."""
    starts = plan.queries.starts.long()
    return _cut(starts[:-1], starts[1:], tile)


def _orders(plans: tuple[BlockPlan, ...], side: str) -> torch.Tensor | None:
    blocks = [getattr(plan, side) for plan in plans]
    if all(b.order is None for b in blocks):
        return None
    return torch.stack([torch.arange(b.tokens) if b.order is None else b.order.cpu() for b in blocks]).to(torch.int32)


def build(plans: HeadPlans, heads: int, tile_queries: int, tile_keys: int, device: torch.device) -> Tables:
    """The lists of `plans` for `heads` = B*H heads in all, on `device`."""
    rows, keys, spans, at_row, at_key = [], [], [], 0, 0
    for plan in plans.plans:
        pointer, tiles = key_tiles(plan, tile_keys)
        block, first, end = query_tiles(plan, tile_queries)
        rows.append(torch.stack((first, end, pointer[block] + at_key, pointer[block + 1] + at_key), 1))
        keys.append(tiles)
        spans.append((at_row, len(block)))
        at_row, at_key = at_row + len(block), at_key + len(tiles)
    assign = torch.zeros(heads) if plans.assign is None else plans.assign.reshape(-1)

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.int32).contiguous().to(device)

    queries, columns = _orders(plans.plans, "queries"), _orders(plans.plans, "keys")
    return Tables(
        there(torch.cat(rows)),
        there(torch.cat(keys)),
        there(torch.tensor(spans)),
        there(assign),
        None if queries is None else there(queries),
        None if columns is None else there(columns),
        max(count for _, count in spans),
    )


_BUILT: dict[int, dict[tuple[int, int, int, torch.device], Tables]] = {}


def tables(plans: HeadPlans, heads: int, tile_queries: int, tile_keys: int, device: torch.device) -> Tables:
    """`build`, remembered for as long as `plans` lives (static plans serve every layer and step)."""
    if id(plans) not in _BUILT:
        _BUILT[id(plans)] = {}
        weakref.finalize(plans, _BUILT.pop, id(plans), None)
    known, key = _BUILT[id(plans)], (heads, tile_queries, tile_keys, device)
    if key not in known:
        known[key] = build(plans, heads, tile_queries, tile_keys, device)
    return known[key]
