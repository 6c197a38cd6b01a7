"""Gates: is this step near enough to the computed ones? Pure functions over a small explicit state.

A gate is a frozen config. `decide(state, seen, step, ruling) -> (hit, new state)` changes nothing but what it
returns; `state.value` is the number it compared with its threshold (None where it did not compare). Where the
guards have ruled already, a gate only brings its state up to date and reads nothing from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from ...core.options import GOT, number, take
from ...errors import unknown
from ...extrapolation.forecast import REUSE, Forecast, Sample, new_sample
from ..step import Ruling, Step, coordinate

S = TypeVar("S")

# What a gate asks to see at each step. The engine knows where a family keeps it.
NOTHING = "nothing"  # content-free: decided on the host, before the loop if need be
PROBE = "probe"  # residual of the first block(s), main stream [B, T, C]
MODULATED = "modulated"  # input of the first block after its modulated norm, [B, T, C]
TIME = "time"  # time embedding, [B, C] or [B, 6, C]: the same for every prompt
OUTPUT = "output"  # only outputs of computed steps, through `record`
INPUT = "input"  # input of the denoiser
GRID = "grid"  # image tokens or latents on their grid, [T, H, W, C] or [B, T, H, W, C]
SAMPLER = "sampler"  # which samples step control wants to reuse, a list of B booleans
PAIR = "pair"  # (output of the first block(s), input of the stack), each [B, T, C]
IN_BLOCKS = (PROBE, PAIR, MODULATED)  # what is only seen when the first blocks run
AT_ROOT = (NOTHING, TIME, INPUT, OUTPUT, GRID, SAMPLER)  # what is seen before the denoiser runs


def relative_l1(current: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """mean|current - previous| / mean|previous|, a scalar tensor; inputs of one shape, e.g. [B, T, C].

    The mean runs over the whole batch. Source: TeaCache (arXiv 2411.19108); used on the residual of the
    first block by First-Block Cache (ParaAttention).
    """
    return (current - previous).abs().mean() / previous.abs().mean()


def worst_relative_l1(current: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """The largest `relative_l1` of any sample of the batch (dimension 0), a scalar tensor."""
    dims = tuple(range(1, current.ndim))
    return ((current - previous).abs().mean(dims) / previous.abs().mean(dims)).max()


DISTANCES = {"mean": relative_l1, "worst": worst_relative_l1}


def check_distance(value: Any) -> None:
    """A distance is one of `DISTANCES`."""
    if value not in DISTANCES:
        raise unknown("distance", str(value), DISTANCES)


def reduce_decision(distance: torch.Tensor, group: Any = None) -> float:
    """The one host read of a compared step. With a process group, the largest distance of any member, for all.

    Limits rule alike on every member, so all of them reach this together or none does.
    """
    if group is not None:
        distance = distance.detach().clone()
        torch.distributed.all_reduce(distance, op=torch.distributed.ReduceOp.MAX, group=group)
    return float(distance)


class Gate(Generic[S]):
    """Base of all gates."""

    observes: ClassVar[str] = NOTHING
    reads_schedule: ClassVar[bool] = False  # whether it needs noise levels
    spans_gaps: ClassVar[bool] = False  # whether it may reuse where the branch was absent from the step before

    @property
    def looks_back(self) -> int | None:
        """How many steps before a decision it depends on, where all of them were computed; None: on any number.

        What a gate keeps at earlier steps is not held where the guards have them computed anyhow.
        """
        return None

    def fit(
        self, total: int | None, branch: str = "cond", sigmas: tuple[float, ...] | None = None, begin: int = 0
    ) -> Gate[S]:
        """This gate for a loop of `total` steps (resampled tables, checked masks); called once per loop and branch.

        `begin`: where in the scheduler's table the loop begins.
        """
        return self

    @property
    def by_expert(self) -> bool:
        """Does it treat each of two experts that share a loop (Wan 2.2) by itself?"""
        return False

    def for_expert(self, first: int, end: int) -> Gate[S]:
        """Fitted to the expert of the steps `first` to `end` (exclusive); asked where it is `by_expert`."""
        return self

    def unfit(self, sigmas: Sequence[float]) -> str | None:
        """Why this gate cannot judge a loop with these noise levels, or None; asked where it `reads_schedule`."""
        return None

    def per_sample(self) -> Gate[S]:
        """This gate with the worst sample of a batch deciding, where it measures a batch at all."""
        return self

    def probe(self, seen: Any) -> torch.Tensor | None:
        """The probe, as predictors that align with it want it, made from what is seen: a residual [B, T, C]."""
        return seen if isinstance(seen, torch.Tensor) else None

    def start(self) -> S:
        """The state before the first step."""
        raise NotImplementedError

    def decide(self, state: S, seen: Any, step: Step, ruling: Ruling = Ruling.FREE) -> tuple[bool, S]:
        """Reuse this step? And the state after it."""
        raise NotImplementedError

    def record(self, state: S, seen: Any, output: torch.Tensor, step: Step) -> S:
        """The state after a step was computed and gave `output`; most gates do not look at outputs."""
        return state


def check_threshold(config: Any, optional: bool = False) -> None:
    """The `threshold` of a gate or a method is a finite number of at least 0; 0 turns a cache off."""
    check = number(0)
    take(config, check.or_none() if optional else check, "threshold", form=GOT)


# ---- distance to the last computed step ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeState:
    """Probes of the last computed steps, newest last."""

    history: tuple[Sample, ...] = ()
    value: float | None = None


@dataclass(frozen=True)
class ProbeGate(Gate[ProbeState]):
    """First-Block Cache and DBCache: reuse while the probe stays near what the last computed steps foretell.

    hit iff mean|r_t - r| / mean|r| < threshold, r the probe's forecast under `predictor`; with order 0 that is the
    probe r_i of the last computed step, as published. A threshold of 1 or more reuses untested
    (cache-dit) unless `tested`.
    Sources: First-Block Cache (ParaAttention, after TeaCache, arXiv 2411.19108); DBCache (cache-dit).

    Attributes:
        threshold: relative change below which a step is reused; 0: never.
        predictor: forecasts the probe.
        distance: "mean" over the batch, or the "worst" sample's.
        tested: compare even where the threshold is 1 or more.
    """

    threshold: float
    predictor: Forecast = REUSE
    distance: str = "mean"
    tested: bool = False
    observes: ClassVar[str] = PROBE

    def __post_init__(self) -> None:
        check_threshold(self)
        check_distance(self.distance)

    @property
    def looks_back(self) -> int:
        """The computed steps that its forecast takes."""
        return self.predictor.depth

    def per_sample(self) -> ProbeGate:
        """With distance "worst"."""
        return replace(self, distance="worst")

    def start(self) -> ProbeState:
        """No probe yet."""
        return ProbeState()

    def decide(
        self, state: ProbeState, seen: torch.Tensor, step: Step, ruling: Ruling = Ruling.FREE
    ) -> tuple[bool, ProbeState]:
        """`seen`: residual of the first block(s), [B, T, C]."""
        value = None
        predictor = self.predictor
        at = float(step.index) if predictor.coordinate == "step" else coordinate(step, predictor.coordinate)
        if ruling is Ruling.FREE and state.history:
            if self.threshold > 0 and (self.threshold < 1 or self.tested):
                known = state.history
                [expected] = predictor.predict(known, at) if predictor.order else known[-1].values
                value = reduce_decision(DISTANCES[self.distance](seen, expected), step.group)
                hit = value < self.threshold
            else:
                hit = self.threshold >= 1
        else:
            hit = ruling is Ruling.REUSE
        if hit:
            return True, ProbeState(state.history, value)
        history = (*state.history, new_sample((at, (seen,), None, step.index == 0)))[-predictor.depth :]
        return False, ProbeState(history, value)


# ---- distance to the step before, added up -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SumState:
    """What was seen at the step before, and the sum of distances since the last computed step."""

    seen: Any = None
    total: float = 0.0
    value: float | None = None
    distance: torch.Tensor | None = None  # of this step, before rescaling; left on the device where it is not needed


@dataclass(frozen=True)
class SumGate(Gate[SumState]):
    """Adds up the change since the last computed step, measured from each step to the next; a hit while it is small.

    The baseline is the step before, reused or not. A computed step sets the sum to 0, ruled or decided.
    Source: TeaCache (arXiv 2411.19108), with `rescale` as its polynomial and `measure` as its distance.
    """

    threshold: float
    distance: str = "mean"
    observes: ClassVar[str] = MODULATED

    def __post_init__(self) -> None:
        check_threshold(self)

    @property
    def looks_back(self) -> int:
        """The step before; a computed one sets the sum to 0."""
        return 1

    def per_sample(self) -> SumGate:
        """With distance "worst"."""
        return replace(self, distance="worst")

    def feature(self, seen: Any, step: Step) -> Any:
        """What is compared, made from what is seen."""
        return seen

    def measure(self, current: Any, previous: Any) -> torch.Tensor:
        """Distance between two features, a scalar tensor."""
        return DISTANCES[self.distance](current, previous)

    def rescale(self, distance: float) -> float:
        """What one step's distance adds to the sum."""
        return distance

    def start(self) -> SumState:
        """Nothing seen."""
        return SumState()

    def decide(self, state: SumState, seen: Any, step: Step, ruling: Ruling = Ruling.FREE) -> tuple[bool, SumState]:
        """`seen`: what `observes` names."""
        feature = self.feature(seen, step)
        if state.seen is None:
            return ruling is Ruling.REUSE, SumState(feature)
        distance = self.measure(feature, state.seen)
        if ruling is Ruling.FREE:
            value = state.total + self.rescale(reduce_decision(distance, step.group))
            hit = value < self.threshold and self.threshold > 0
            return hit, SumState(feature, value if hit else 0.0, value, distance)
        hit = ruling is Ruling.REUSE
        return hit, SumState(feature, state.total if hit else 0.0, None, distance)
