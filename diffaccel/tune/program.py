"""The best schedule for every number of computed steps at once, by dynamic programming over what gaps cost.

A gap's cost depends on the computed steps that its forecasts rest on and on the one behind it, so a state is those
last (order + 1) computed steps. Errors of different gaps are added as if they had nothing to do with one another
(their squares are summed); what they do have is left to `descend`, which changes one step at a time under the whole
squared error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .skips import Mask, Nodes, Skips, loss_db, squared


@dataclass(frozen=True)
class Best:
    """The cheapest schedule of so many computed steps, and the sum of its gaps' costs."""

    mask: Mask
    cost: float


def gap_costs(skips: Skips, gram: np.ndarray, nodes: Nodes, longest: int) -> dict[int, float]:
    """Next computed step (N: none) -> cost of the steps left out before it. `gram` is one matrix [N, N]."""
    first, last = nodes[-1] + 1, nodes[-1] + 1 + longest
    ends = [after for after in range(first, skips.steps + 1) if after <= last]
    values = squared(np.stack([skips.row(nodes, after) for after in ends]), gram)
    costs = dict(zip(ends, values.tolist(), strict=True))
    costs[first] = 0.0  # nothing is left out
    return costs


def best_schedules(skips: Skips, gram: np.ndarray, longest: int | None = None) -> dict[int, Best]:
    """Number of computed steps -> the cheapest schedule; exact for the sum of the gaps' costs.

    `gram`: one Gram matrix [N, N] (of all prompts). `longest`: at most so many steps are left out in a row. Step 0 is
    always computed. Numbers that no schedule reaches are left out.
    """
    total, limit = skips.steps, skips.steps if longest is None else longest
    cost: dict[Nodes, np.ndarray] = {(0,): np.full(total + 1, np.inf)}
    cost[(0,)][1] = 0.0
    came: dict[tuple[Nodes, int], Nodes] = {}
    ended: dict[int, tuple[float, Nodes]] = {}
    for newest in range(total):
        for nodes in [state for state in cost if state[-1] == newest]:
            here = cost[nodes]
            for after, more in gap_costs(skips, gram, nodes, limit).items():
                if after == total:
                    for count in np.flatnonzero(np.isfinite(here)).tolist():
                        if here[count] + more < ended.get(count, (np.inf, ()))[0]:
                            ended[count] = (float(here[count] + more), nodes)
                    continue
                onward = (*nodes, after)[-skips.method.depth :]
                there = cost.setdefault(onward, np.full(total + 1, np.inf))
                better = np.flatnonzero(here[:-1] + more < there[1:])
                there[better + 1] = here[better] + more
                for count in better.tolist():
                    came[onward, count + 1] = nodes
    return {count: Best(_walk(came, nodes, count, total), value) for count, (value, nodes) in sorted(ended.items())}


def _walk(came: dict[tuple[Nodes, int], Nodes], nodes: Nodes, count: int, total: int) -> Mask:
    """From the last state back to the first: which steps were computed."""
    computed = {nodes[-1]}
    while count > 1:
        nodes = came[nodes, count]
        count -= 1
        computed.add(nodes[-1])
    return tuple(t in computed for t in range(total))


def swaps(mask: Mask) -> Iterator[Mask]:
    """Every schedule that differs in one computed and one skipped step; step 0 stays computed."""
    for off in (t for t, flag in enumerate(mask) if flag and t):
        for on in (t for t, flag in enumerate(mask) if not flag):
            yield tuple((flag and t != off) or t == on for t, flag in enumerate(mask))


def losses(skips: Skips, gram: np.ndarray, masks: list[Mask]) -> np.ndarray:
    """Mean over prompts of the whole squared error in dB, per schedule; `gram` is [P, N, N]."""
    return loss_db(np.stack([skips.combination(mask) for mask in masks]), gram)


def descend(skips: Skips, gram: np.ndarray, mask: Mask, keep: int = 3) -> dict[Mask, float]:
    """Steepest descent by swaps until none helps: the end, and its nearest misses, with their losses in dB."""
    loss = float(losses(skips, gram, [mask])[0])
    while True:
        around = list(swaps(mask))
        if not around:
            return {mask: loss}
        values = losses(skips, gram, around)
        order = np.argsort(values, kind="stable")
        if values[order[0]] >= loss:
            return {mask: loss, **{around[at]: float(values[at]) for at in order[:keep].tolist()}}
        mask, loss = around[order[0]], float(values[order[0]])
