"""MagCache's gate: how far would the residual's length have drifted? Known per model before the loop; content-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch

from ...core.options import GOT, number, take, take_plain, whole
from ...errors import InvalidOptionError, unknown
from ..step import Ruling, Step
from .base import NOTHING, Gate, check_threshold

ROUNDINGS = ("down", "half_up", "up")


@dataclass(frozen=True, slots=True)
class RatioState:
    """Since the last computed step: the product of ratios, the summed error, and the number of steps."""

    ratio: float = 1.0
    error: float = 0.0
    steps: int = 0
    value: float | None = None
    trace: tuple[float, float, int] | None = None  # the three above as they were compared, before any reset


def check_reach(config: Any, optional: bool = False) -> None:
    """`max_steps` and `retention` of the gate or of its method; `optional`: None is the table's own."""
    most, share = whole(0), number(0, 1, "between 0 and 1")
    take(config, most.or_none() if optional else most, "max_steps", form=GOT)
    lie = "{name} must lie {allowed}, got {value}"
    take(config, share.or_none() if optional else share, "retention", form=lie)


@dataclass(frozen=True)
class MagnitudeGate(Gate[RatioState]):
    """MagCache: A <- A g_t, k <- k + 1, E <- E + |1 - A|; hit iff E <= threshold and k <= max_steps; a miss resets.

    g_t is the published mean ratio of residual norms between neighbouring steps. Nothing before the retained steps
    is counted. Source: MagCache (arXiv 2506.09045), its error model and skipping rule; ratios in tables/magcache.json.

    Attributes:
        threshold: error E up to which a step is reused; 0: never.
        ratios: g_t, one per calibrated step, the first one 1; resampled to the loop by `fit`.
        max_steps: K, the most steps in a row that may be reused.
        retention: share of the steps, from the start, that is always computed.
        ratios_uncond: g_t of the unconditional branch, where it was calibrated apart.
        exclude: calibrated indices whose steps are always computed (the FLUX reference: 11 of 28, a dip to 0.98).
        rounding: of retention x steps: "half_up" (FLUX, diffusers), "down" (Wan 2.1, Hunyuan), "up" (OmniGen2).
        strict: a hit needs E < threshold (Wan, Qwen) rather than E <= threshold.
        source_sigmas: noise levels of the calibrated steps; with them ratios follow the noise, not the index.
        experts: where two experts share the loop (Wan 2.2), each starts anew, and its own first share `retention` is
            computed; those not listed here (0: high noise, 1: low noise) reuse nothing. None: one loop for both.
    """

    threshold: float
    ratios: tuple[float, ...]
    max_steps: int = 3
    retention: float = 0.2
    ratios_uncond: tuple[float, ...] | None = None
    exclude: tuple[int, ...] = ()
    rounding: str = "half_up"
    strict: bool = False
    source_sigmas: tuple[float, ...] | None = None
    experts: tuple[int, ...] | None = None
    first: int = 0  # the steps of the expert at hand, set by `for_expert`
    end: int | None = None
    observes: ClassVar[str] = NOTHING

    def __post_init__(self) -> None:
        take_plain(self)
        check_threshold(self)
        check_reach(self)
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", str(self.rounding), ROUNDINGS)
        if not self.ratios or not all(math.isfinite(r) and r > 0 for r in self.ratios):
            raise InvalidOptionError("ratios must be positive numbers, one per calibrated step")

    @property
    def reads_schedule(self) -> bool:  # type: ignore[override]
        """Only where ratios follow the noise levels."""
        return self.source_sigmas is not None

    def fit(
        self, total: int | None, branch: str = "cond", sigmas: tuple[float, ...] | None = None, begin: int = 0
    ) -> MagnitudeGate:
        """The gate with one ratio per step of the loop, of this branch.

        A loop that begins late in the table (image-to-image) takes the ratios of the steps it has.
        """
        ratios = self.ratios_uncond if branch.startswith("uncond") and self.ratios_uncond else self.ratios
        if total is None:
            raise InvalidOptionError("MagCache needs to know the number of steps, and this loop does not say it")
        places = nearest_indices(len(ratios), total + begin)[begin:]
        if self.source_sigmas is not None and sigmas is not None:
            fitted = tuple(resample_by_sigma(ratios, self.source_sigmas, sigmas[:total]))
        else:
            fitted = tuple(ratios[i] for i in places)
        excluded = tuple(t for t, place in enumerate(places) if place in self.exclude)
        return replace(self, ratios=fitted, ratios_uncond=None, exclude=excluded, source_sigmas=None)

    @property
    def by_expert(self) -> bool:
        """Where `experts` says so."""
        return self.experts is not None

    def for_expert(self, first: int, end: int) -> MagnitudeGate:
        """With the steps of this expert."""
        return replace(self, first=first, end=end)

    def _computed(self, index: int) -> bool:
        """Is this step computed whatever the ratios say: retained, or of an expert that reuses nothing?"""
        if self.end is None:
            return index < self.retained(len(self.ratios))
        assert self.experts is not None
        reuses = (1 if self.first else 0) in self.experts and self.first < index < self.end
        return not reuses or index - self.first < self.retained(self.end - self.first)

    def retained(self, total: int) -> int:
        """How many steps at the start are always computed."""
        share = self.retention * total
        return math.ceil(share) if self.rounding == "up" else int(share + 0.5 * (self.rounding == "half_up"))

    def start(self) -> RatioState:
        """Nothing has drifted."""
        return RatioState()

    def decide(
        self, state: RatioState, seen: Any, step: Step, ruling: Ruling = Ruling.FREE
    ) -> tuple[bool, RatioState]:
        """`seen` is not looked at. The gate must have been fitted to the loop."""
        if self._computed(step.index) and ruling is not Ruling.REUSE:
            return False, RatioState()
        ratio = state.ratio * self.ratios[step.index]
        error, steps = state.error + abs(1 - ratio), state.steps + 1
        trace = (ratio, error, steps)
        if ruling is Ruling.FREE:
            hit = (error < self.threshold if self.strict else error <= self.threshold) and self.threshold > 0
            hit = hit and steps <= self.max_steps and step.index not in self.exclude
        else:
            hit = ruling is Ruling.REUSE
        if hit:
            return True, RatioState(ratio, error, steps, error, trace)
        return False, RatioState(value=error, trace=trace)


def nearest_indices(source: int, target: int) -> list[int]:
    """Which of `source` calibrated steps stands for each of `target` steps: round(j (source-1) / (target-1)).

    Halves go to the even neighbour, in float64 (diffusers rounds in float32 and differs at 39, 77, 103 steps). A
    single step takes the last one. Source: `nearest_interp` of MagCache and diffusers.
    """
    if target == 1:
        return [source - 1]
    return [round(j * (source - 1) / (target - 1)) for j in range(target)]


def resample_by_sigma(ratios: Sequence[float], source_sigmas: Sequence[float], sigmas: Sequence[float]) -> list[float]:
    """Ratios for other noise levels: ln|R| is summed along the calibrated steps and interpolated in sigma.

    A step twice as long gets the product of the two ratios it spans, which taking the nearest index does not give
    (our own formula: ratios belong to noise levels, not to indices). Levels outside the calibrated ones keep the
    length at the end. Both sigma lists fall; entry t of `ratios` leads from source_sigmas[t-1] to [t].
    """
    if len(ratios) != len(source_sigmas):
        raise InvalidOptionError(f"{len(ratios)} ratios need as many source sigmas, got {len(source_sigmas)}")
    heights, height = [], 0.0
    for t, ratio in enumerate(ratios):
        height += math.log(ratio) if t else 0.0
        heights.append(height)
    fitted = [_interpolate(sigma, source_sigmas, heights) for sigma in sigmas]
    return [1.0] + [math.exp(now - before) for before, now in pairwise(fitted)]


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear interpolation for falling xs, constant beyond the ends."""
    if x >= xs[0]:
        return ys[0]
    for i in range(1, len(xs)):
        if x >= xs[i]:
            return ys[i] + (ys[i - 1] - ys[i]) * (x - xs[i]) / (xs[i - 1] - xs[i])
    return ys[-1]


def magnitude_ratio(current: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Calibrates one g_t: mean over tokens of |R_t| / |R_{t-1}|, norms over channels of residuals [B, T, C]; a scalar.

    The mean of ratios, not the ratio of means. Source: MagCache (arXiv 2506.09045), definition of the
    magnitude ratio.
    """
    ratios: torch.Tensor = current.norm(dim=-1) / previous.norm(dim=-1)
    return ratios.mean()


def calibrate_ratios(residuals: Sequence[torch.Tensor]) -> list[float]:
    """g_0 .. g_{N-1} of one run with every step computed, from the stack's residuals [B, T, C] of each step."""
    return [1.0] + [float(magnitude_ratio(now, before)) for before, now in pairwise(residuals)]
