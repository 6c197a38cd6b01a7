"""Block-sparse attention through PyTorch's flex_attention.

Uncompiled, flex_attention ignores block lists and evaluates the mask function over all pairs; compiled, it does the
reverse for blocks that are listed as full. So both are always given, made from the same plan.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...errors import InvalidOptionError
from ..plan import BlockPlan, Blocks, HeadPlans

BLOCK = 128  # flex_attention's own granularity
EAGER_TOKENS = 4096  # uncompiled, all scores are kept at once: 16 million numbers per head at this length


def lacks(device: torch.device, tokens: int) -> str | None:
    """Why flex_attention cannot serve there, in a clause; None when it can."""
    if device.type == "cuda":
        return None
    if device.type != "cpu":
        return f"flex_attention needs a CUDA device or a CPU, not {device.type}"
    if tokens > EAGER_TOKENS:
        return (
            f"flex_attention on a CPU is not compiled here and computes every pair: at most {EAGER_TOKENS} tokens, "
            f"not {tokens}; the kernel 'torch' is faster on a CPU at any length"
        )
    return None


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _block_of(blocks: Blocks, device: torch.device) -> torch.Tensor:
    """[N] block of every position."""
    return torch.repeat_interleave(torch.arange(blocks.count), blocks.starts.diff().long()).to(device)


def _overlap(blocks: Blocks) -> torch.Tensor:
    """[tiles, blocks] number of positions that a tile of BLOCK positions shares with a block."""
    edges = torch.arange(0, blocks.tokens + BLOCK, BLOCK).clamp(max=blocks.tokens)
    edges = edges[: -(-blocks.tokens // BLOCK) + 1]
    starts = blocks.starts.long()
    low = torch.maximum(edges[:-1, None], starts[None, :-1])
    high = torch.minimum(edges[1:, None], starts[None, 1:])
    return (high - low).clamp(min=0).double()


def tile_lists(plan: BlockPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [query tiles, key tiles] maps over tiles of BLOCK positions: kept in part, kept in full."""
    rows, columns = _overlap(plan.queries), _overlap(plan.keys)
    kept = rows @ plan.block_mask().double() @ columns.T
    full = kept == rows.sum(1)[:, None] * columns.sum(1)[None]
    return (kept > 0) & ~full, full


def _csr(tiles: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(number, indices with the kept ones first) per row, as BlockMask wants them."""
    order = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return tiles.sum(1, dtype=torch.int32)[None, None].to(device), order[None, None].to(device)


def block_mask(plan: BlockPlan, device: torch.device) -> Any:
    """The plan as flex_attention's BlockMask over the positions of the new order, with a mask function that agrees."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, columns = _block_of(plan.queries, device), _block_of(plan.keys, device)
    kept = plan.block_mask().to(device)

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return kept[rows[query], columns[key]]

    part, full = tile_lists(plan)
    return BlockMask.from_kv_blocks(
        *_csr(part, device),
        *_csr(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(plan.queries.tokens, plan.keys.tokens),
    )


def _ordered(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return x if order is None else x.index_select(1, order.to(x.device))


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: BlockPlan,
    scale: float | None,
    want_lse: bool,
    compiled: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Heads [n, N, D] that share a plan."""
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    run = _compiled() if compiled else module.flex_attention
    wish: dict[str, Any] = {}
    if want_lse:  # PyTorch 2.9 renamed the request
        wish = {"return_aux": module.AuxRequest(lse=True)} if hasattr(module, "AuxRequest") else {"return_lse": True}
    q = _ordered(q, plan.queries.order)
    k, v = (_ordered(x, plan.keys.order) for x in (k, v))
    batched = (x[None].contiguous() for x in (q, k, v))
    found = run(*batched, block_mask=block_mask(plan, q.device), scale=scale, **wish)
    out = found[0][0] if want_lse else found[0]
    lse = getattr(found[1], "lse", found[1])[0] if want_lse else None
    if plan.queries.order is None:
        return out, lse
    back = torch.argsort(plan.queries.order).to(q.device)
    return out.index_select(1, back), None if lse is None else lse.index_select(1, back)


def block_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plans: HeadPlans,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    compiled: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the kept blocks of `plans`; arguments and result as `kernels.triton_sparse.block_sparse`.

    `compiled` of None compiles on CUDA (at the first call with a shape; not run on a GPU by us) and not on a CPU,
    where compiling takes half a minute and cannot return the log-sum-exp.

    Raises:
        InvalidOptionError: where flex_attention cannot serve, with the reason.
    """
    compiled = q.device.type == "cuda" if compiled is None else compiled
    reason = None if compiled else lacks(q.device, q.shape[2])
    if reason is not None:
        raise InvalidOptionError(reason)
    group = q.shape[1] // k.shape[1]
    heads = [x.flatten(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    assign = torch.zeros(len(heads[0]), dtype=torch.long) if plans.assign is None else plans.assign.reshape(-1)
    out = torch.empty_like(heads[0])
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
    for number, plan in enumerate(plans.plans):
        chosen = (assign == number).nonzero()[:, 0].to(q.device)
        if len(chosen):
            q1, k1, v1 = (x[chosen] for x in heads)
            own, sums = _one(q1, k1, v1, plan, scale, return_lse, compiled)
            out[chosen] = own
            if sums is not None:
                lse[chosen] = sums
    out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])
    return (out, lse) if return_lse else out
