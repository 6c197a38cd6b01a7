"""Candidate pictures against their references, prompt by prompt: every measure that fits, faults, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from ..errors import InvalidOptionError
from . import perceptual
from .bootstrap import LEVEL, Interval, bootstrap, paired
from .broken import faults
from .comparison import compare
from .metrics import as_batch
from .structure import scales

CAP_DB = 100.0  # identical pictures have no finite PSNR, and a difference of two needs one
DECIBELS = ("psnr", "motion_psnr")
LOWER_IS_BETTER = ("mse", "max_error", "lpips", "colour_shift", "flicker_rise")
BOUNDS = {"score": (0.0, 1.0), "reference_score": (0.0, 1.0), "ssim": (-1.0, 1.0), "ms_ssim": (0.0, 1.0)}
NOT_NEGATIVE = ("mse", "max_error", "lpips", "colour_shift")
Score = Callable[[torch.Tensor, str], float]  # how well one picture [C, H, W] or video shows its prompt, in 0..1


@dataclass(frozen=True)
class Judgement:
    """Per prompt the measures against the reference, the fault if any, and how well it shows the prompt."""

    rows: tuple[Mapping[str, float], ...]
    faults: tuple[str | None, ...]
    level: float = LEVEL

    def values(self, metric: str) -> list[float]:
        """One number per prompt; decibels of identical pictures are infinite."""
        return [row[metric] for row in self.rows]

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(self.rows[0]) if self.rows else ()

    def interval(self, metric: str) -> Interval | None:
        """The mean over prompts. Identical pictures are left out of decibels; None where all are. No end lies where no
        value can be."""
        values = [value for value in self.values(metric) if value != math.inf]
        if not values:
            return None
        found = bootstrap(values, self.level)
        least, most = BOUNDS.get(metric, (0.0 if metric in NOT_NEGATIVE else -math.inf, math.inf))
        return replace(found, low=max(found.low, least), high=min(found.high, most))

    def lead(self, other: Judgement, metric: str) -> Interval:
        """What this is higher by than `other`, paired by prompt; decibels of identical pictures count as 100."""
        ours, theirs = ([min(v, CAP_DB) for v in side.values(metric)] for side in (self, other))
        return paired(ours, theirs, self.level)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Plain data: per measure mean, interval and the worst prompt's, and in how many pictures it is perfect."""
        out: dict[str, dict[str, Any]] = {}
        for metric in self.metrics:
            found, values = self.interval(metric), self.values(metric)
            worst = max(values) if metric in LOWER_IS_BETTER else min(values)
            out[metric] = {
                "mean": None if found is None else _finite(found.mean),
                "interval": [] if found is None else [_finite(v) for v in found.to_list(6)],
                "worst": _finite(worst),
                "each": [_finite(value) for value in values],
            }
            if metric in DECIBELS:
                out[metric]["identical"] = sum(value == math.inf for value in values)
        return out


def judge(
    reference: Any,
    candidate: Any,
    metrics: Iterable[str] | None = None,
    *,
    prompts: Sequence[str] = (),
    score: Score | None = None,
    level: float = LEVEL,
) -> Judgement:
    """Measure each picture or video of `candidate` against the same one of `reference`.

    metrics: as for `compare`; all that fit this size and are installed, unless given. `score` (with one of the
    `prompts` per picture) adds "score", and "reference_score" beside it. `level`: probability of the intervals.
    Raises InvalidOptionError where the two sides do not show the same pictures.
    """
    ours, theirs = as_batch(reference), as_batch(candidate)
    if ours.shape != theirs.shape:
        raise InvalidOptionError(
            f"the reference has shape {list(ours.shape)} but the candidate has {list(theirs.shape)}: "
            "both must show the same pictures at the same size"
        )
    if score is not None and len(prompts) != len(theirs):
        raise InvalidOptionError(f"judge: {len(prompts)} prompts for {len(theirs)} pictures; give one for each")
    names = fitting(theirs) if metrics is None else metrics
    rows = [_row(ours[i : i + 1], theirs[i : i + 1], names) for i in range(len(theirs))]
    if score is not None:
        for row, one, other, prompt in zip(rows, ours, theirs, prompts, strict=True):
            row |= {"score": score(other, prompt), "reference_score": score(one, prompt)}
    return Judgement(tuple(rows), tuple(faults(theirs)), level)


def _row(one: torch.Tensor, other: torch.Tensor, names: Iterable[str]) -> dict[str, float]:
    """Measures of one picture; where it holds what is no number, none of them is one."""
    if not bool(other.isfinite().all()):
        return dict.fromkeys(names, math.nan)
    return compare(one, other, names)


def fitting(pictures: torch.Tensor) -> tuple[str, ...]:
    """The measures for pictures [B, C, H, W] or videos [B, F, C, H, W] of this size, of what is installed."""
    side = min(pictures.shape[-2:])
    names = ["psnr", "max_error", "colour_shift"]
    names += ["ssim", "ms_ssim"] if scales(side) else []
    names += ["lpips"] if side >= perceptual.MIN_SIDE and perceptual.available() else []
    if pictures.ndim == 5:
        names += ["motion_psnr"] if pictures.shape[1] >= 2 else []
        names += ["flicker_rise"] if pictures.shape[1] >= 3 else []
    return tuple(names)


def mean_of(judgement: Judgement, metric: str) -> float:
    """The mean with identical pictures at 100 dB, for what needs one number: a place on a curve."""
    return fmean(min(value, CAP_DB) if metric in DECIBELS else value for value in judgement.values(metric))


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
