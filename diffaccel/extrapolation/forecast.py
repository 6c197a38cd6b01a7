"""Forecasts: what a skipped part would have said. Pure functions over a history of computed steps.

Every basis is a linear combination of the stored tensors: y = sum_k w_k f_k, whose weights are host numbers that
depend on the coordinates alone. They sum to 1, so a constant is always predicted exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from ..core.options import GOT, NUMBER, number, one_of, take
from ..errors import unknown
from .hermite import hermite_weights
from .ladder import ladder_weights
from .newton import newton_weights

COORDINATES = ("sigma", "step", "timestep")

# (coordinates, oldest first; where to predict) -> one weight per coordinate
BASES: dict[str, Callable[[Sequence[float], float], list[float]]] = {
    "hermite": hermite_weights,
    "ladder": ladder_weights,
    "newton": newton_weights,
}


class Sample(NamedTuple):
    """One computed step: its coordinate, its tensors (one per stream, e.g. [B, T, C]) and its probe, if kept.

    `first` marks the first step of a loop that begins at full noise; see `trusted`.
    """

    at: float
    values: tuple[torch.Tensor, ...]
    probe: torch.Tensor | None = None
    first: bool = False


# Sample((at, values, probe, first)) without a Python call, for what runs at every step.
new_sample: Callable[[tuple[float, tuple[torch.Tensor, ...], torch.Tensor | None, bool]], Sample] = partial(
    tuple.__new__, Sample
)


def trusted(history: Sequence[Sample]) -> Sequence[Sample]:
    """The samples a slope may rest on: not the loop's first one while only one more is known.

    At full noise the denoiser points at the mean of the data and bends at once, so that the slope between the first
    two samples foretells nothing. TaylorSeer and cache-dit never form a derivative from step 0; where a third sample
    is known, the first does more good than harm.
    """
    return history[1:] if len(history) == 2 and history[0].first else history


def combine(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """sum_k w_k f_k for weights that sum to 1, newest value last, all of one shape, e.g. [B, T, C].

    Written as newest + sum w_k (f_k - newest): differences are small where values are not. Half precision is summed
    in float32, as weights of opposite sign cancel. One value is returned as it is, so order 0 is bit-equal.
    """
    newest = values[-1]
    if len(values) == 1:
        return newest
    wide = newest.float() if newest.dtype in (torch.bfloat16, torch.float16) else newest
    total = wide
    for value, weight in zip(values[:-1], weights, strict=False):
        total = torch.add(total, value.to(wide.dtype) - wide, alpha=weight)
    return total.to(newest.dtype)


@dataclass(frozen=True)
class Forecast:
    """Extrapolates the stored tensors to the step at hand; order 0 reuses the newest as it is.

    Attributes:
        order: 0 to 3; the history holds order + 1 computed steps, and fewer of them give a lower order.
        basis: "newton" (exact), "ladder" (as published) or "hermite".
        coordinate: "step", "timestep" or "sigma": the axis along which features are taken to be smooth.
        max_gain: the order is lowered until sum |w_k|, by which errors of stored tensors are amplified, is at most
            this; None for no limit. Order 1 one step ahead of two equally spaced points has gain 3, order 2 has 7.
        sigma: contraction of the Hermite basis.
    """

    order: int = 1
    basis: str = "newton"
    coordinate: str = "step"
    max_gain: float | None = None
    sigma: float = 0.5
    depth: int = field(init=False, repr=False, compare=False)  # how many computed steps the history must hold
    needs_probe: ClassVar[bool] = False

    def __post_init__(self) -> None:
        take(self, one_of(0, 1, 2, 3), "order", form=GOT)
        if self.basis not in BASES:
            raise unknown("basis", str(self.basis), BASES)
        if self.coordinate not in COORDINATES:
            raise unknown("coordinate", str(self.coordinate), COORDINATES)
        take(self, number(1, words="at least 1").or_none(), "max_gain", form=GOT)
        take(self, NUMBER, "sigma", form=GOT)
        object.__setattr__(self, "depth", self.order + 1)  # the one way to set a field of a frozen dataclass

    def _basis(self, coordinates: Sequence[float], at: float) -> list[float]:
        if self.basis == "hermite":
            return hermite_weights(coordinates, at, self.sigma)
        return BASES[self.basis](coordinates, at)

    def pick(self, history: Sequence[Sample], at: float) -> tuple[list[Sample], list[float]]:
        """The samples that take part, newest last, and their weights.

        Of steps at one coordinate (schedulers repeat timesteps) only the newest takes part; the loop's first step does
        not while it is one of two (`trusted`).
        """
        samples: list[Sample] = []
        for sample in reversed(trusted(history)):
            if len(samples) < self.depth and all(sample.at != other.at for other in samples):
                samples.insert(0, sample)
        weights = self._basis([s.at for s in samples], at)
        while self.max_gain is not None and len(samples) > 1 and sum(map(abs, weights)) > self.max_gain:
            del samples[0]
            weights = self._basis([s.at for s in samples], at)
        return samples, weights

    def predict(
        self, history: Sequence[Sample], at: float, probe: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """What the streams would be at coordinate `at`; `history` is not empty, newest last."""
        if self.order == 0:
            return history[-1].values
        samples, weights = self.pick(history, at)
        return tuple([combine(column, weights) for column in zip(*(s.values for s in samples), strict=True)])


REUSE = Forecast(order=0)
