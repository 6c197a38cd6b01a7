"""Block-sparse attention in plain PyTorch: for the CPU, and for any device without Triton.

A plan becomes a short list of dense pieces of work. Query blocks with the same key list are put next to each other
and computed in one call; a key list that is one contiguous run is sliced, any other is gathered; heads that share a
plan go together. PyTorch's own SDPA does each piece, so this gains wherever SDPA's time is proportional to the keys.
What is derived from a plan is kept for as long as the plan lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from ...errors import InvalidOptionError
from ..plan import BlockPlan, Blocks, HeadPlans

MANY_RUNS = 32  # more contiguous runs of keys than this are gathered by token index
SCORE_BYTES = 2**26  # of float32 scores held at once where the log-sum-exp is wanted

Run = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """One dense piece: query positions start to stop (in the prepared order), and the keys that all of them see."""

    start: int
    stop: int
    runs: tuple[Run, ...]
    keys: int


@dataclass
class Prepared:
    """What `block_sparse` needs of one plan.

    Attributes:
        sizes: tokens of queries and of keys.
        full: every query sees every key.
        pieces: the work; together they cover all queries.
        q_order, q_back, k_order: token at each position, its inverse, and the same of the keys; None: as they come.
        most: keys of the largest piece that must be gathered.
    """

    sizes: tuple[int, int]
    full: bool
    pieces: tuple[Piece, ...]
    q_order: torch.Tensor | None
    q_back: torch.Tensor | None
    k_order: torch.Tensor | None
    most: int
    _there: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)

    def on(self, name: str, device: torch.device) -> torch.Tensor | None:
        """One of the orders on a device (moved once)."""
        tensor: torch.Tensor | None = getattr(self, name)
        if tensor is None:
            return None
        if (name, device) not in self._there:
            self._there[name, device] = tensor.to(device)
        return self._there[name, device]

    def tokens_of(self, index: int, device: torch.device) -> torch.Tensor:
        """[keys] int64: key positions of a piece."""
        name = f"piece {index}"
        if (name, device) not in self._there:
            runs = [torch.arange(*run) for run in self.pieces[index].runs]
            self._there[name, device] = torch.cat(runs).to(device)
        return self._there[name, device]


_PREPARED: WeakKeyDictionary[BlockPlan, dict[int, Prepared]] = WeakKeyDictionary()


def prepare(plan: BlockPlan, coarsen: int = 1) -> Prepared:
    """The work of a plan; computed once for a plan object.

    Args:
        coarsen: up to so many neighbouring groups of query blocks share the union of their key lists. 1 is exact;
            more keeps pairs that the plan leaves out, and makes calls longer.
    """
    known = _PREPARED.setdefault(plan, {})
    if coarsen not in known:
        known[coarsen] = _prepare(plan, coarsen)
    return known[coarsen]


def _prepare(plan: BlockPlan, coarsen: int) -> Prepared:
    rows, columns = plan.queries.count, plan.keys.count
    key_order = None if plan.keys.order is None else plan.keys.order.cpu()
    sizes = plan.queries.tokens, plan.keys.tokens
    if len(plan.indices) == rows * columns:
        return Prepared(sizes, True, (), None, None, None, 0)
    groups = _coarser(_groups(plan), coarsen)
    sequence = [row for group, _ in groups for row in group]
    order = _reordered(plan.queries, sequence)
    key_starts = plan.keys.starts.tolist()
    lengths = plan.queries.starts.diff().tolist()
    pieces, position, most = [], 0, 0
    for group, blocks in groups:
        size = sum(lengths[row] for row in group)
        runs = tuple(_runs(blocks, key_starts))
        keys = sum(stop - start for start, stop in runs)
        if size:
            pieces.append(Piece(position, position + size, runs, keys))
            most = max(most, keys if len(runs) > 1 else 0)
        position += size
    back = None if order is None else torch.empty_like(order).index_put_((order,), torch.arange(len(order)))
    return Prepared(sizes, False, tuple(pieces), order, back, key_order, most)


def _groups(plan: BlockPlan) -> list[tuple[list[int], tuple[int, ...]]]:
    """(query blocks, key blocks that all of them see), in order of first appearance."""
    found: dict[tuple[int, ...], list[int]] = {}
    indptr, indices = plan.indptr.tolist(), plan.indices.tolist()
    for row in range(plan.queries.count):
        found.setdefault(tuple(indices[indptr[row] : indptr[row + 1]]), []).append(row)
    return [(rows, blocks) for blocks, rows in found.items()]


def _coarser(groups: list[tuple[list[int], tuple[int, ...]]], coarsen: int) -> list[tuple[list[int], tuple[int, ...]]]:
    """`coarsen` neighbouring groups at a time made one, over the union of their keys."""
    if coarsen == 1:
        return groups
    parts = [groups[i : i + coarsen] for i in range(0, len(groups), coarsen)]
    return [
        ([row for rows, _ in part for row in rows], tuple(sorted({block for _, blocks in part for block in blocks})))
        for part in parts
    ]


def _reordered(blocks: Blocks, sequence: list[int]) -> torch.Tensor | None:
    """Tokens block by block in another sequence of blocks; None where that changes nothing."""
    if sequence == list(range(blocks.count)):
        return None if blocks.order is None else blocks.order.cpu()
    tokens = torch.arange(blocks.tokens) if blocks.order is None else blocks.order.cpu()
    starts = blocks.starts.tolist()
    return torch.cat([tokens[starts[row] : starts[row + 1]] for row in sequence])


def _runs(blocks: tuple[int, ...], starts: list[int]) -> Iterator[Run]:
    """Contiguous key positions of ascending block indices."""
    begin = end = 0
    for block in blocks:
        if starts[block] == starts[block + 1]:
            continue
        if starts[block] != end:
            if end > begin:
                yield begin, end
            begin = starts[block]
        end = starts[block + 1]
    if end > begin:
        yield begin, end


def block_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plans: HeadPlans,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    coarsen: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the pairs that the plans keep.

    Args:
        q: [B, H, Nq, D]; k, v: [B, H, Nk, D]; any device and float dtype.
        plans: one plan for all heads, or one for each of several sets of heads.
        scale: of the scores; None: D ** -0.5.
        return_lse: also give the log-sum-exp, and compute in float32 without SDPA.
        coarsen: see `prepare`; 1 is exact.

    Returns:
        [B, H, Nq, D] in q's dtype and strides; with `return_lse`, and float32 [B, H, Nq] of natural logarithms. A
        query that sees no key gets 0 and -inf. Where one plan keeps everything for all heads, the very output of SDPA.

    Raises:
        InvalidOptionError: shapes that do not fit each other or the plans.
    """
    _fit(q, k, v, plans, coarsen)
    if plans.assign is None or len(plans.plans) == 1:
        return _one_plan(q, k, v, prepare(plans.plans[0], coarsen), scale, return_lse)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for batch, head, plan in _sets_of_heads(plans):
        where = batch.to(q.device), head.to(q.device)
        part = _one_plan(q[where][None], k[where][None], v[where][None], prepare(plan, coarsen), scale, return_lse)
        if isinstance(part, tuple):
            lse[where] = part[1][0]
            part = part[0]
        out[where] = part[0]
    return (out, lse) if return_lse else out


def _sets_of_heads(plans: HeadPlans) -> Iterator[tuple[torch.Tensor, torch.Tensor, BlockPlan]]:
    """(batch indices, head indices, the plan that those heads share)."""
    assert plans.assign is not None
    for index, plan in enumerate(plans.plans):
        batch, head = (plans.assign == index).nonzero(as_tuple=True)
        if len(batch):
            yield batch, head, plan


def _fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plans: HeadPlans, coarsen: int) -> None:
    """Raise unless tensors and plans are of one size."""
    if q.ndim != 4 or k.shape != v.shape or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3]):
        shapes = [list(x.shape) for x in (q, k, v)]
        raise InvalidOptionError(f"q, k and v must be [B, H, N, D] with the same B, H and D, not {shapes}")
    if coarsen < 1:
        raise InvalidOptionError(f"coarsen={coarsen}: it must be at least 1")
    for plan in plans.plans:
        tokens, have = prepare(plan, coarsen).sizes, (q.shape[2], k.shape[2])
        if tokens != have:
            raise InvalidOptionError(f"the plan is for {tokens} queries and keys, q and k have {have} tokens")
    if plans.assign is None and len(plans.plans) != 1:
        raise InvalidOptionError(f"{len(plans.plans)} plans without an assignment of heads")
    if plans.assign is not None and plans.assign.shape != q.shape[:2]:
        given, need = list(plans.assign.shape), list(q.shape[:2])
        raise InvalidOptionError(f"the assignment of heads is {given}, batch and heads are {need}")


def _one_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Prepared, scale: float | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """All heads of q, k, v under one plan."""
    if work.full:
        if return_lse:
            return _with_lse(q, k, v, scale)
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    q_order, back, k_order = (work.on(name, q.device) for name in ("q_order", "q_back", "k_order"))
    if q_order is not None:
        q = _take(q, q_order)
    if k_order is not None:
        k, v = _take(k, k_order), _take(v, k_order)
    own = q_order is not None and not q.requires_grad  # our copy: a piece's output may take its queries' place
    out = q if own else torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    room = [x.new_empty(x.shape[0] * x.shape[1] * work.most * x.shape[3]) for x in (k, v)]
    for index, piece in enumerate(work.pieces):
        rows = slice(piece.start, piece.stop)
        if not piece.keys:
            out[:, :, rows] = 0
            if lse is not None:
                lse[:, :, rows] = -torch.inf
            continue
        keys, values = (_keys(x, work, index, buffer) for x, buffer in zip((k, v), room, strict=True))
        if lse is not None:
            out[:, :, rows], lse[:, :, rows] = _with_lse(q[:, :, rows], keys, values, scale)
        else:
            out[:, :, rows] = F.scaled_dot_product_attention(q[:, :, rows], keys, values, scale=scale)
    if back is not None:
        out = _take(out, back)
        lse = None if lse is None else lse.index_select(2, back)
    return out if lse is None else (out, lse)


def _take(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """x [B, H, N, D] with its tokens in another order and its strides kept.

    A view whose heads lie within a token (as processors make them) is taken token by token: 12 times faster.
    """
    if x.stride(1) < x.stride(2):
        return x.transpose(1, 2).index_select(1, tokens).transpose(1, 2)
    return x.index_select(2, tokens)


def _keys(x: torch.Tensor, work: Prepared, index: int, room: torch.Tensor) -> torch.Tensor:
    """Keys (or values) of a piece: a view of one run, or several runs copied into `room` (no new memory a piece)."""
    piece = work.pieces[index]
    if len(piece.runs) == 1:
        start, stop = piece.runs[0]
        return x[:, :, start:stop]
    shape = (x.shape[0], x.shape[1], piece.keys, x.shape[3])
    into = room[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)
    if len(piece.runs) > MANY_RUNS:
        return torch.index_select(x, 2, work.tokens_of(index, x.device), out=into)
    return torch.cat([x[:, :, start:stop] for start, stop in piece.runs], 2, out=into)


def _with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in float32 and its log-sum-exp, some rows at a time."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    turned, values = k.float().transpose(-1, -2), v.float()
    step = max(1, SCORE_BYTES // (4 * q.shape[0] * q.shape[1] * k.shape[2]))
    outs, lses = [], []
    for rows in q.split(step, 2):
        scores = (rows.float() * scale) @ turned
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp_() @ values)
        lses.append(lse)
    return torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)
