"""The gate of AdaCache (whole stack): each computed step's change buys steps until the next computed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...core.options import is_number, is_whole, plain
from ...errors import InvalidOptionError
from ..step import Ruling, Step
from .base import OUTPUT, Gate, reduce_decision, relative_l1

# Published for Open-Sora: change below the key -> steps until the next computed one.
CODEBOOK_100 = {0.03: 12, 0.05: 10, 0.07: 8, 0.09: 6, 0.11: 4, 1.00: 3}
CODEBOOK_30_FAST = {0.08: 6, 0.16: 5, 0.24: 4, 0.32: 3, 0.40: 2, 1.00: 1}


def adacache_rate(distance: float, codebook: Mapping[float, int]) -> int:
    """Steps until the next computed one: the entry of the smallest bound above `distance`, else the last entry.

    Source: AdaCache (arXiv 2411.02397), the codebook of caching rates.
    """
    for bound in sorted(codebook):
        if distance < bound:
            return codebook[bound]
    return codebook[max(codebook)]


@dataclass(frozen=True, slots=True)
class RatesState:
    """Probe of the last computed step, its index, and the step that is computed next."""

    probe: torch.Tensor | None = None
    last: int = 0
    due: int = 0
    value: float | None = None


@dataclass(frozen=True)
class RatesGate(Gate[RatesState]):
    """AdaCache (whole stack): c = d(r_t, r_i) / (t - i) of computed steps t and i sets how many pass until the next.

    r is the stack's residual, d relative L1. In the paper r is the attention of each layer (Open-Sora: watched at
    block 13) and the change is scaled by a motion term (MoReg); neither is part of this.
    Source: AdaCache (arXiv 2411.02397); codebooks published for Open-Sora only.

    Attributes:
        codebook: bound on c -> steps until the next computed one.
    """

    codebook: tuple[tuple[float, int], ...] = tuple(CODEBOOK_30_FAST.items())
    observes: ClassVar[str] = OUTPUT

    def __post_init__(self) -> None:
        book = self.codebook
        if isinstance(book, Mapping):
            book = tuple(book.items())
        book = plain(book)
        object.__setattr__(self, "codebook", book)  # the one way to set a field of a frozen dataclass
        pairs = isinstance(book, Sequence) and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in book)
        numbers = pairs and all(is_number(bound) and is_whole(rate) and rate >= 1 for bound, rate in book)
        if not book or not numbers:
            raise InvalidOptionError(f"a codebook maps bounds to whole numbers of at least 1, got {self.codebook!r}")

    @property
    def looks_back(self) -> int:
        """Two computed steps give the change."""
        return 2

    def start(self) -> RatesState:
        """The first step is due."""
        return RatesState()

    def decide(
        self, state: RatesState, seen: Any, step: Step, ruling: Ruling = Ruling.FREE
    ) -> tuple[bool, RatesState]:
        """`seen` is not looked at: this step was decided at the last computed one."""
        hit = step.index < state.due if ruling is Ruling.FREE else ruling is Ruling.REUSE
        return hit, replace(state, value=None)

    def record(self, state: RatesState, seen: Any, output: torch.Tensor, step: Step) -> RatesState:
        """`output`: residual of the watched block at this computed step, [B, T, C]."""
        if state.probe is None:
            return RatesState(output, step.index, step.index + 1)
        change = reduce_decision(relative_l1(output, state.probe), step.group) / max(step.index - state.last, 1)
        return RatesState(output, step.index, step.index + adacache_rate(change, dict(self.codebook)), change)
