"""A block plan: which blocks of keys each block of queries attends to, as compressed rows (CSR) over true lengths.

Every method of sparse attention ends in this one form, and every kernel starts from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Blocks:
    """How the tokens of one side are put in order and cut.

    Attributes:
        starts: [n + 1] int32, on the CPU; block i is positions starts[i] to starts[i+1] of the new order, so blocks
            may be of any length and the last one short; starts[0] is 0, starts[n] the number of tokens.
        order: [N] int64, the token at each position of the new order; None: as the tokens come.
    """

    starts: torch.Tensor
    order: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.starts[-1])

    def block_of_token(self) -> torch.Tensor:
        """[N] int64, on the CPU: the block of every token as they come."""
        at = torch.repeat_interleave(torch.arange(self.count), self.starts.diff().long())
        return at if self.order is None else torch.empty_like(at).index_put_((self.order.cpu(),), at)

    @classmethod
    def even(cls, tokens: int, block: int, order: torch.Tensor | None = None) -> Blocks:
        """Blocks of `block` tokens, the last one with what is left."""
        starts = torch.arange(0, tokens + block, block, dtype=torch.int32).clamp_(max=tokens)
        return cls(starts[: -(-tokens // block) + 1], order)


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Which key blocks each query block attends to, for the heads that share this plan.

    Attributes:
        queries, keys: order and cuts of either side.
        indptr: [queries.count + 1] int32, on the CPU; row i's key blocks are indices[indptr[i] : indptr[i+1]].
        indices: [kept] int32, on the CPU, ascending within a row. A row may be empty: its output is 0 and its
            log-sum-exp -inf.
    """

    queries: Blocks
    keys: Blocks
    indptr: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of_mask(cls, kept: torch.Tensor, queries: Blocks, keys: Blocks) -> BlockPlan:
        """From a [query blocks, key blocks] boolean map."""
        kept = kept.cpu()
        indptr = torch.zeros(len(kept) + 1, dtype=torch.int32)
        indptr[1:] = kept.sum(1).cumsum(0)
        return cls(queries, keys, indptr, kept.nonzero()[:, 1].to(torch.int32))

    def block_mask(self) -> torch.Tensor:
        """[query blocks, key blocks] boolean map."""
        kept = torch.zeros(self.queries.count, self.keys.count, dtype=torch.bool)
        rows = torch.repeat_interleave(torch.arange(self.queries.count), self.indptr.diff().long())
        kept[rows, self.indices.long()] = True
        return kept

    def token_mask(self) -> torch.Tensor:
        """[N, N] boolean map over tokens as they come (small sizes: for tests and references)."""
        wide = self.block_mask()
        wide = wide.repeat_interleave(self.queries.starts.diff().long(), 0)
        wide = wide.repeat_interleave(self.keys.starts.diff().long(), 1)
        mask = torch.empty_like(wide)
        rows = self.queries.order if self.queries.order is not None else torch.arange(self.queries.tokens)
        columns = self.keys.order if self.keys.order is not None else torch.arange(self.keys.tokens)
        mask[rows.cpu()[:, None], columns.cpu()[None]] = wide
        return mask

    @property
    def density(self) -> float:
        """Kept pairs of tokens over all pairs."""
        rows, columns = self.queries.starts.diff().double(), self.keys.starts.diff().double()
        each = torch.repeat_interleave(rows, self.indptr.diff().long())
        return float((each * columns[self.indices.long()]).sum() / (rows.sum() * columns.sum()))


@dataclass(frozen=True, eq=False)
class HeadPlans:
    """One plan for all heads, or several and which head uses which.

    Attributes:
        plans: the distinct plans; all over the same number of tokens.
        assign: [B, H] int64, on the CPU: index into `plans` of every head; None: plan 0 for all.
    """

    plans: tuple[BlockPlan, ...]
    assign: torch.Tensor | None = None

    @property
    def density(self) -> float:
        """Kept pairs over all pairs, mean over heads."""
        if self.assign is None:
            return self.plans[0].density
        each = torch.tensor([plan.density for plan in self.plans], dtype=torch.float64)
        return float(each[self.assign].mean())
