"""A gate, a predictor and limits as one pure machine: the part of a step cache that knows nothing of models.

Per denoiser call of a branch: `decide`, then either `forecast` (a hit) or compute and `store` (a miss). All state is
one frozen `Memory`, so a run can be paused, copied and resumed by keeping a reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from .gates import NOTHING, Gate
from .limits import Limits, Tally, rule
from .predictors import REUSE, Sample
from .step import Ruling, Step, coordinate


class Predictor(Protocol):
    """What a skipped part would have said, from computed steps."""

    @property
    def depth(self) -> int:
        """How many computed steps it uses."""

    @property
    def needs_probe(self) -> bool:
        """Whether samples must carry the gate's probe."""

    @property
    def coordinate(self) -> str:
        """The axis on which samples lie: "step", "timestep" or "sigma"."""

    def predict(
        self, history: Sequence[Sample], at: float, probe: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The streams at coordinate `at`; `history` is not empty, newest last."""


NOTHING_DONE = Tally()


@dataclass(frozen=True, slots=True)
class Memory:
    """What one branch of one denoiser remembers within a loop."""

    gate: Any
    tally: Tally = NOTHING_DONE
    history: tuple[Sample, ...] = ()  # computed steps, newest last
    value: float | None = None  # what the gate compared at the last step, None where it did not
    index: int = -1  # the last step that was decided


@dataclass(frozen=True)
class Policy:
    """Any gate with any predictor under any limits. Attributes say which."""

    gate: Gate[Any]
    predictor: Predictor = REUSE
    limits: Limits = field(default_factory=Limits)

    def fit(self, total: int | None, branch: str = "cond", sigmas: tuple[float, ...] | None = None) -> Policy:
        """The policy for one loop and branch; refuses masks and tables that do not fit it."""
        self.limits.check(total)
        return replace(self, gate=self.gate.fit(total, branch, sigmas))

    def start(self) -> Memory:
        """The memory at the start of a loop."""
        return Memory(self.gate.start())

    def decide(self, memory: Memory, seen: Any, step: Step) -> tuple[bool, Memory]:
        """Reuse this step? `seen` is what `gate.observes` names.

        A step is computed where nothing is stored, and where the branch was absent from the step before (guidance
        that comes and goes): sums and baselines would not reach across the gap.
        """
        ready = memory.history and step.index == memory.index + 1
        ruling = rule(self.limits, memory.tally, step) if ready else Ruling.COMPUTE
        hit, state = self.gate.decide(memory.gate, seen, step, ruling)
        value = state.value
        old = memory.tally
        error = old.error if value is None else old.error + value
        tally = Tally(old.consecutive + 1, old.reused + 1, error) if hit else Tally(0, old.reused, error)
        return hit, Memory(state, tally, memory.history, value, step.index)

    def forecast(self, memory: Memory, step: Step, seen: Any = None) -> tuple[torch.Tensor, ...]:
        """What the skipped part would have added, per stream; `seen` as given to `decide`."""
        probe = self.gate.probe(seen) if self.predictor.needs_probe else None
        return self.predictor.predict(memory.history, coordinate(step, self.predictor.coordinate), probe)

    def store(
        self,
        memory: Memory,
        step: Step,
        values: tuple[torch.Tensor, ...],
        seen: Any = None,
        output: torch.Tensor | None = None,
    ) -> Memory:
        """Remember a computed step: `values` per stream, e.g. [B, T, C]; `output` for gates that look at it."""
        probe = self.gate.probe(seen) if self.predictor.needs_probe else None
        kind = self.predictor.coordinate
        sample = Sample(float(step.index) if kind == "step" else coordinate(step, kind), values, probe)
        history = (*memory.history, sample)[-self.predictor.depth :]
        state = memory.gate if output is None else self.gate.record(memory.gate, seen, output, step)
        stored = Memory(state, memory.tally, history, memory.value, memory.index)
        cap = self.limits.max_bytes
        while cap is not None and stored.history and bytes_held(stored) > cap:
            stored = replace(stored, history=stored.history[1:])
        return stored


def forecast_error(
    policy: Policy, memory: Memory, step: Step, values: tuple[torch.Tensor, ...], seen: Any = None
) -> torch.Tensor | None:
    """What a reuse would have missed at this computed step: relative L1 of the main stream per sample, [B].

    `values` are the true ones; call it before `store`. None while nothing is stored.
    """
    if not memory.history:
        return None
    truth, guess = values[0], policy.forecast(memory, step, seen)[0]
    dims = tuple(range(1, truth.ndim))
    return (guess - truth).abs().mean(dims) / truth.abs().mean(dims)


def foresee(policy: Policy, total: int, seen: Sequence[Any] | None = None) -> list[bool]:
    """The hits of a whole loop, decided on the host before it starts: for gates that look at nothing, or at the time
    embedding, whose values for all steps are then given as `seen`. True = reused."""
    if policy.gate.observes != NOTHING and seen is None:
        raise ValueError(f"this gate looks at {policy.gate.observes!r}, so its hits are not known before the loop")
    memory, hits = policy.start(), []
    for index in range(total):
        step = Step(index, total)
        hit, memory = policy.decide(memory, None if seen is None else seen[index], step)
        if not hit:
            memory = replace(memory, history=(Sample(float(index), ()),))
        hits.append(hit)
    return hits


def bytes_held(memory: Memory) -> int:
    """Bytes of all tensors that a memory refers to, each storage counted once."""
    sizes: dict[int, int] = {}

    def visit(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, (tuple, list)):
            for part in thing:
                visit(part)
        elif hasattr(thing, "__slots__"):
            for name in thing.__slots__:
                visit(getattr(thing, name))

    visit((memory.gate, memory.history))
    return sum(sizes.values())
