"""What calibration remembers of the inputs of linear layers: a running maximum per channel and a few rows.

Activations of a whole run would be gigabytes; here the bytes are fixed beforehand. Rows are drawn by reservoir
sampling, so that every token of every run has the same chance to be among them.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import BudgetError

Tensor = torch.Tensor

DEFAULT_MAX_BYTES = 512 * 2**20
MOST_ROWS = 512  # more rows do not change which alpha wins
FEWEST_ROWS = 8


@dataclass
class Seen:
    """The inputs of one layer.

    Attributes:
        absmax: [K] float32, the largest magnitude of every channel.
        rows: [R, K] a uniform sample of the inputs, R at most `most`.
        least: the smallest value, of all channels.
        count: rows seen so far.
    """

    absmax: Tensor
    rows: Tensor
    least: float
    count: int

    @classmethod
    def nothing(cls, columns: int) -> Seen:
        """Before the first input."""
        return cls(torch.zeros(columns), torch.zeros(0, columns), float("inf"), 0)

    def add(self, x: Tensor, most: int, seed: int) -> None:
        """Take in x [..., K]. The same seeds in the same order give the same sample."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if not len(rows):
            return
        self.absmax = torch.maximum(self.absmax, rows.abs().amax(0).float().cpu())
        self.least = min(self.least, float(rows.min()))
        free = min(most - len(self.rows), len(rows))
        if free > 0:
            self.rows = torch.cat((self.rows, rows[:free].float().cpu()))
        later = len(rows) - max(free, 0)
        if later > 0:
            draw = torch.Generator().manual_seed(seed)
            nth = self.count + max(free, 0) + 1 + torch.arange(later, dtype=torch.float64)
            taken = (torch.rand(later, generator=draw, dtype=torch.float64) < most / nth).nonzero().view(-1)
            slots = torch.randint(most, (len(taken),), generator=draw)
            picked = rows[max(free, 0) :][taken.to(rows.device)].float().cpu()
            for slot, row in zip(slots.tolist(), picked, strict=True):  # in order: a later one takes the slot
                self.rows[slot] = row
        self.count += len(rows)


class Collector:
    """Watches linear layers while the model runs.

    Args:
        layers: name -> layer.
        max_bytes: bound of everything that is kept, over all layers.

    Raises:
        BudgetError: fewer than 8 rows per layer fit.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.layers = dict(layers)
        self.most = rows_within([layer.in_features for layer in layers.values()], max_bytes)
        self.seen = {name: Seen.nothing(layer.in_features) for name, layer in layers.items()}

    @contextlib.contextmanager
    def watching(self, run: int = 0) -> Iterator[Collector]:
        """Take in what the layers read inside the block; `run` numbers the runs, for the draws."""
        calls = dict.fromkeys(self.layers, 0)

        def hook(name: str):  # type: ignore[no-untyped-def]
            def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                calls[name] += 1
                self.seen[name].add(args[0], self.most, zlib.crc32(f"{name} {run} {calls[name]}".encode()))

            return look

        handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in self.layers.items()]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def bytes_held(self) -> int:
        """Bytes of everything kept so far."""
        return sum(4 * (s.absmax.numel() + s.rows.numel()) for s in self.seen.values())


def rows_within(columns: Sequence[int], max_bytes: int) -> int:
    """How many sampled rows per layer fit into `max_bytes` (float32, together with the maxima)."""
    one = 4 * sum(columns)
    rows = min(MOST_ROWS, max_bytes // one - 1) if one else MOST_ROWS
    if rows < FEWEST_ROWS:
        need = one * (FEWEST_ROWS + 1)
        raise BudgetError(
            f"max_bytes={max_bytes}: {FEWEST_ROWS} rows of the inputs of {len(columns)} layers take {need} bytes; "
            f"allow at least that, or quantize fewer layers"
        )
    return rows
