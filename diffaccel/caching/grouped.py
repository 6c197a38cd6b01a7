"""A policy that decides for every sample of a batch by itself, as if each were run alone.

A step is left out only where all samples ask for it. Where some do, the whole batch is computed, the others get their
own forecasts put over what was computed, and only those that were due remember it: so each sample's picture is that
of its single run, at the price of the most restless one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..extrapolation.forecast import Sample
from .guards import ReuseCounts
from .policy import ALL, Memory, Policy, forecast_error, half_of
from .step import Step

Rows = tuple[int, ...]
_KEPT = Sample(0.0, ())  # stands in the joint history for a step that every sample remembers


def groups_of(rows: int, doubled: bool) -> tuple[Rows, ...]:
    """The rows of every sample: one, or one of each half where a batch holds both guidance branches."""
    half = rows // 2
    return tuple((i, i + half) for i in range(half)) if doubled and rows % 2 == 0 else tuple((i,) for i in range(rows))


def select_rows(seen: Any, rows: Rows) -> Any:
    """What one sample shows the gate: its rows of a tensor, of a list, or of each tensor of a tuple."""
    if isinstance(seen, torch.Tensor):
        return seen[list(rows)]
    if isinstance(seen, list):
        return [seen[row] for row in rows]
    return tuple([select_rows(item, rows) for item in seen]) if isinstance(seen, tuple) else seen


def _part_of_pair(half: slice) -> slice:
    """Which of a sample's two rows lies in this half of the batch."""
    return slice(0, 1) if half.start == 0 else slice(1, 2)


@dataclass(frozen=True)
class GroupedPolicy:
    """`Policy` for a batch whose samples lie at `groups`. Its memory's `gate` holds one `Memory` for each of them."""

    policy: Policy
    groups: tuple[Rows, ...]

    @property
    def gate(self) -> Any:
        """That of one sample."""
        return self.policy.gate

    @property
    def predictor(self) -> Any:
        """That of one sample."""
        return self.policy.predictor

    @classmethod
    def of(cls, policy: Policy, groups: tuple[Rows, ...]) -> GroupedPolicy:
        """A fitted policy shared out; a cap on bytes is for all samples together."""
        cap = policy.guards.max_bytes
        if cap is not None:
            policy = replace(policy, guards=replace(policy.guards, max_bytes=cap // len(groups)))
        return cls(policy, groups)

    def start(self) -> Memory:
        """Nothing remembered of any sample."""
        return Memory(tuple([self.policy.start() for _ in self.groups]))

    def half_of(self, policy: Policy, memory: Memory, half: slice, rows: int) -> tuple[Policy | GroupedPolicy, Memory]:
        """(the policy for calls on the rows `half` of `rows` alone, what this memory says about them).

        `policy` is fitted to such calls. Every sample has one row left of its two; where each row was a sample of its
        own, the samples of that half are left.
        """
        if any(len(group) == 2 for group in self.groups):
            parts, later = [half_of(part, 2, _part_of_pair(half)) for part in memory.gate], self.groups
        else:
            parts, later = list(memory.gate[half]), self.groups[half]
        return GroupedPolicy.of(policy, groups_of(len(later), False)), self._joint(parts, memory.last)

    def _joint(self, parts: list[Memory], index: int) -> Memory:
        values = [part.value for part in parts if part.value is not None]
        kept = min(len(part.history) for part in parts)
        consecutive = min(part.counts.consecutive for part in parts)
        return Memory(tuple(parts), ReuseCounts(consecutive), (_KEPT,) * kept, max(values, default=None), index)

    def _each(
        self, memory: Memory, step: Step, ask: Callable[[Memory, Rows], tuple[bool, Memory]]
    ) -> tuple[bool, Memory]:
        answers = [ask(part, rows) for part, rows in zip(memory.gate, self.groups, strict=True)]
        return all(hit for hit, _ in answers), self._joint([part for _, part in answers], step.index)

    def decide(self, memory: Memory, seen: Any, step: Step) -> tuple[bool, Memory]:
        """Do all samples ask to reuse this step? Waits for the device once per sample that compares."""
        return self._each(memory, step, lambda part, rows: self.policy.decide(part, select_rows(seen, rows), step))

    def follow(self, memory: Memory, hits: tuple[bool, ...], step: Step) -> tuple[bool, Memory]:
        """Do what another branch's `verdicts` say about this step, sample by sample."""
        fits = len(hits) == len(self.groups)
        wanted = dict(zip(self.groups, hits if fits else [False] * len(self.groups), strict=True))
        return self._each(memory, step, lambda part, rows: self.policy.follow(part, wanted[rows], step))

    def verdicts(self, memory: Memory) -> tuple[bool, ...]:
        """Of every sample, whether it asked to reuse the step that was decided last."""
        return tuple([part.counts.consecutive > 0 for part in memory.gate])

    def forecast(self, memory: Memory, step: Step, seen: Any = None, part: slice = ALL) -> tuple[torch.Tensor, ...]:
        """What the skipped part would have said to every sample, per stream."""
        said = [
            self.policy.forecast(one, step, select_rows(seen, rows), part)
            for one, rows in zip(memory.gate, self.groups, strict=True)
        ]
        return tuple([self._gather(list(column)) for column in zip(*said, strict=True)])

    def _gather(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        whole = pieces[0].new_empty((sum(map(len, self.groups)), *pieces[0].shape[1:]))
        for piece, rows in zip(pieces, self.groups, strict=True):
            whole[list(rows)] = piece
        return whole

    def answers(self, memory: Memory, step: Step, seen: Any) -> list[tuple[list[int], tuple[torch.Tensor, ...]]]:
        """(rows, forecasts per stream) of every sample that asked to reuse a step that is computed for the others."""
        return [
            (list(rows), self.policy.forecast(part, step, select_rows(seen, rows)))
            for part, rows, hit in zip(memory.gate, self.groups, self.verdicts(memory), strict=True)
            if hit
        ]

    def error(self, memory: Memory, step: Step, values: tuple[torch.Tensor, ...], seen: Any) -> torch.Tensor:
        """What a reuse would have missed for every row, [B]; not a number where nothing is remembered."""
        rows = values[0].shape[0]
        errors = torch.full((rows,), float("nan"), device=values[0].device)
        for part, mine in zip(memory.gate, self.groups, strict=True):
            own = forecast_error(
                self.policy, part, step, tuple([select_rows(v, mine) for v in values]), select_rows(seen, mine)
            )
            if own is not None:
                errors[list(mine)] = own.to(errors.dtype)
        return errors

    def store(
        self,
        memory: Memory,
        step: Step,
        values: tuple[torch.Tensor, ...],
        seen: Any = None,
        output: torch.Tensor | None = None,
    ) -> Memory:
        """Remember a computed step, for the samples that were due."""

        def keep(part: Memory, rows: Rows) -> Memory:
            mine = tuple([select_rows(value, rows) for value in values])
            return self.policy.store(part, step, mine, select_rows(seen, rows), select_rows(output, rows))

        return self._due(memory, keep)

    def record(self, memory: Memory, step: Step, seen: Any, output: torch.Tensor) -> Memory:
        """Show the gate what a computed step gave, for the samples that were due."""
        return self._due(
            memory,
            lambda part, rows: self.policy.record(part, step, select_rows(seen, rows), select_rows(output, rows)),
        )

    def without(self, memory: Memory, history: bool, gate: bool) -> Memory:
        """A memory without what is no longer of use to any sample."""
        return self._joint([self.policy.without(part, history, gate) for part in memory.gate], memory.last)

    def _due(self, memory: Memory, change: Callable[[Memory, Rows], Memory]) -> Memory:
        """The memory with `change` made to the samples that did not ask to reuse this step."""
        each = zip(memory.gate, self.groups, self.verdicts(memory), strict=True)
        return self._joint([part if hit else change(part, rows) for part, rows, hit in each], memory.last)
