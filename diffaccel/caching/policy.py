"""A gate, a predictor and guards as one pure machine: the part of a step cache that knows nothing of models.

Per denoiser call of a branch: `decide`, then either `forecast` (a hit) or compute and `store` (a miss). All state is
one frozen `Memory`, so a run can be paused, copied and resumed by keeping a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ..extrapolation.forecast import REUSE, Sample, new_sample
from .gates.base import NOTHING, TIME, Gate
from .guards import Guards, ReuseCounts, rule
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


NOTHING_REUSED = ReuseCounts()
ALL = slice(None)
MAIN = slice(0, 1)


class Memory(NamedTuple):
    """What one branch of one denoiser remembers within a loop."""

    gate: Any
    counts: ReuseCounts = NOTHING_REUSED
    history: tuple[Sample, ...] = ()  # computed steps, newest last
    value: float | None = None  # what the gate compared at the last step, None where it did not
    last: int = -1  # the last step that was decided


# Memory((gate, counts, history, value, last)) without a Python call, for what runs at every step.
new_memory: Callable[[tuple[Any, ReuseCounts, tuple[Sample, ...], float | None, int]], Memory] = partial(
    tuple.__new__, Memory
)


@dataclass(frozen=True)
class Policy:
    """Any gate with any predictor under any guards.

    Attributes:
        gate, predictor, guards: which.
        wary: a loop that begins at full noise does not trust its first step (`extrapolation.forecast.trusted`); the
            published formulas do not know this.
    """

    gate: Gate[Any]
    predictor: Predictor = REUSE
    guards: Guards = field(default_factory=Guards)
    wary: bool = True

    def fit(
        self,
        total: int | None,
        branch: str = "cond",
        sigmas: tuple[float, ...] | None = None,
        begin: int = 0,
        expert: tuple[int, int] | None = None,
    ) -> Policy:
        """The policy for one loop and branch; refuses masks and tables that do not fit it.

        `begin` is where in the scheduler's full table the loop begins (image-to-image starts late); `expert` the
        first and the last step (exclusive) of the denoiser, where two share the loop.
        """
        gate = self.gate.fit(total, branch, sigmas, begin)
        gate = gate if expert is None else gate.for_expert(*expert)
        return replace(self, gate=gate, guards=self.guards.fit(total))

    @property
    def static(self) -> bool:
        """Are all decisions of a loop known before it (a time embedding's values are)?"""
        return self.gate.observes in (NOTHING, TIME)

    @property
    def reads_schedule(self) -> bool:
        """Does anything here look at noise levels or timesteps?"""
        guards, gate = self.guards, self.gate
        kinds = (self.predictor.coordinate, getattr(getattr(gate, "predictor", None), "coordinate", "step"))
        bounds = guards.sigma_high is not None or guards.sigma_low is not None
        return bounds or gate.reads_schedule or any(kind != "step" for kind in kinds)

    def start(self) -> Memory:
        """The memory at the start of a loop."""
        return Memory(self.gate.start())

    def decide(self, memory: Memory, seen: Any, step: Step) -> tuple[bool, Memory]:
        """Reuse this step? `seen` is what `gate.observes` names.

        A step is computed where nothing is stored, and where the branch was absent from the step before (guidance
        that comes and goes): sums and baselines would not reach across the gap, unless the gate `spans_gaps`.
        """
        ready = memory.history and (step.index == memory.last + 1 or self.gate.spans_gaps)
        ruling = rule(self.guards, memory.counts, step) if ready else Ruling.COMPUTE
        hit, state = self.gate.decide(memory.gate, seen, step, ruling)
        value = state.value
        old = memory.counts
        if hit or old.consecutive or (value is not None and self.guards.max_accumulated is not None):
            error = old.error if value is None else old.error + value
            old = ReuseCounts(old.consecutive + 1, old.reused + 1, error) if hit else ReuseCounts(0, old.reused, error)
        return hit, new_memory((state, old, memory.history, value, step.index))

    def follow(self, memory: Memory, hit: bool, step: Step) -> tuple[bool, Memory]:
        """Do what another branch decided for this step, where anything is stored that a reuse could use."""
        hit = hit and bool(memory.history) and step.index == memory.last + 1
        old = memory.counts
        counts = ReuseCounts(old.consecutive + 1 if hit else 0, old.reused + hit, old.error)
        return hit, new_memory((memory.gate, counts, memory.history, None, step.index))

    def forecast(self, memory: Memory, step: Step, seen: Any = None, part: slice = ALL) -> tuple[torch.Tensor, ...]:
        """What the skipped part would have added, per stream; `seen` as given to `decide`, `part` of the streams."""
        probe = self.gate.probe(seen) if self.predictor.needs_probe else None
        history = memory.history
        if part is not ALL:
            history = tuple([sample._replace(values=sample.values[part]) for sample in history])
        return self.predictor.predict(history, coordinate(step, self.predictor.coordinate), probe)

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
        at = float(step.index) if kind == "step" else coordinate(step, kind)
        sample = new_sample((at, values, probe, self.wary and step.index == 0))
        history = (*memory.history, sample)[-self.predictor.depth :]
        stored = new_memory((memory.gate, memory.counts, history, memory.value, memory.last))
        if output is not None:
            return self.record(stored, step, seen, output)
        return stored if self.guards.max_bytes is None else self._within(stored, self.guards.max_bytes)

    def record(self, memory: Memory, step: Step, seen: Any, output: torch.Tensor) -> Memory:
        """Show the gate what a computed step gave."""
        shown = memory._replace(gate=self.gate.record(memory.gate, seen, output, step))
        return shown if self.guards.max_bytes is None else self._within(shown, self.guards.max_bytes)

    def without(self, memory: Memory, history: bool, gate: bool) -> Memory:
        """A memory without what is no longer of use: computed steps, and what the gate keeps."""
        return memory._replace(
            gate=self.gate.start() if gate else memory.gate, history=() if history else memory.history
        )

    def _within(self, memory: Memory, most: int) -> Memory:
        """What of a memory may be kept: older steps go first, and in the end what the gate keeps."""
        while memory.history and bytes_held(memory) > most:
            memory = memory._replace(history=memory.history[1:])
        return memory if memory.history or bytes_held(memory) <= most else memory._replace(gate=self.gate.start())


def forecast_error(
    policy: Policy, memory: Memory, step: Step, values: tuple[torch.Tensor, ...], seen: Any = None
) -> torch.Tensor | None:
    """What a reuse would have missed at this computed step: relative L1 of the main stream per sample, [B].

    `values` are the true ones; call it before `store`. None while nothing is stored.
    """
    if not memory.history:
        return None
    truth = values[0]
    guess = (
        policy.forecast(memory, step, seen, MAIN)[0] if policy.predictor.depth > 1 else memory.history[-1].values[0]
    )
    dims, wide = tuple(range(1, truth.ndim)), torch.promote_types(truth.dtype, torch.float32)
    size = torch.linalg.vector_norm  # of order 1: the sum of absolute values
    missed: torch.Tensor = size(guess - truth, 1, dims, dtype=wide) / size(truth, 1, dims, dtype=wide)
    return missed


class Foreseen(NamedTuple):
    """The decisions of a whole loop: one entry per step, True = reused, and the numbers the gate compared."""

    hits: list[bool]
    values: list[float | None]


def foresee(policy: Policy, total: int, seen: Sequence[Any] | None = None, sigmas: Sequence[float] = ()) -> Foreseen:
    """A whole loop decided on the host before it starts: for gates that look at nothing, or at the time embedding,
    whose values for all steps are then given as `seen`. `policy` must be fitted to the loop."""
    if policy.gate.observes != NOTHING and seen is None:
        raise ValueError(f"this gate looks at {policy.gate.observes!r}, so its hits are not known before the loop")
    memory, done = policy.start(), Foreseen([], [])
    for index in range(total):
        step = Step(index, total, sigma=sigmas[index] if index < len(sigmas) else None)
        hit, memory = policy.decide(memory, None if seen is None else seen[index], step)
        if not hit:
            memory = memory._replace(history=(Sample(float(index), ()),))
        done.hits.append(hit)
        done.values.append(memory.value)
    return done


class Holding(NamedTuple):
    """Per step of a loop, whether what it leaves can still be of use to a later reused step."""

    history: tuple[bool, ...]
    gate: tuple[bool, ...]


def holding(policy: Policy, total: int, sigmas: Sequence[float] = ()) -> Holding | None:
    """What to hold after each step of a loop; None where the guards' window holds all of it.

    All steps before the window are computed, and push out of the memory what lies further back than the predictor and
    the gate look; behind the window's last step nothing is of use. (Other guards do not count here: where a window
    does not forbid it, the report says at computed steps too what a reuse would have missed.)
    """
    steps = (Step(index, total, sigma=sigmas[index] if index < len(sigmas) else None) for index in range(total))
    inside = list(map(policy.guards.in_window, steps))
    if all(inside):
        return None
    gate, following = policy.gate.looks_back, []
    nearest = total + max(policy.predictor.depth, gate or 0)  # none
    for index in range(total - 1, -1, -1):
        following.append(nearest - index)  # steps to the next one inside
        nearest = index if inside[index] else nearest
    following.reverse()
    gates = tuple(gate is None or ahead <= gate for ahead in following)
    return Holding(tuple(ahead <= policy.predictor.depth for ahead in following), gates)


def bytes_held(*memories: Memory) -> int:
    """Bytes of all tensors that memories refer to, each storage counted once."""
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

    for memory in memories:
        visit((memory.gate, memory.history))
    return sum(sizes.values())


def mapped(memory: Memory, change: Callable[[torch.Tensor], torch.Tensor]) -> Memory:
    """A memory with every tensor that the gate and the computed steps hold changed."""

    def part(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return change(thing)
        if isinstance(thing, tuple):
            parts = [part(item) for item in thing]
            return type(thing)(*parts) if hasattr(thing, "_fields") else tuple(parts)
        if hasattr(type(thing), "__slots__") and is_dataclass(thing) and not isinstance(thing, type):
            return replace(thing, **{f.name: part(getattr(thing, f.name)) for f in fields(thing)})
        return thing

    return memory._replace(gate=part(memory.gate), history=part(memory.history))


def half_of(memory: Memory, rows: int, half: slice) -> Memory:
    """What a memory of a batch of `rows` says about the rows `half` of it; shares the tensors' storage."""
    return mapped(memory, lambda tensor: tensor[half] if tensor.ndim and len(tensor) == rows else tensor)


def cut_tokens(memory: Memory, count: int) -> Memory:
    """A memory with the first `count` tokens of what it holds of blocks, [B, T, C]; what is shorter stays."""
    return mapped(memory, lambda tensor: tensor[:, :count] if tensor.ndim == 3 else tensor)
