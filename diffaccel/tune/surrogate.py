"""Schedules judged without the model: what the plain runs and the real ones so far say of any of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .program import Best, best_schedules, descend, losses, swaps
from .record import Recording
from .runs import Trial
from .skips import Mask, Method, Skips, methods, squared
from .survival import Damping, Seen, fit

Candidate = tuple[Mask, Method]
LONGEST = 12  # steps left out in a row, at most (more where so few are computed that it must be)


@dataclass(frozen=True)
class Surrogate:
    """The plain runs, and how much of an error is left at the end as real runs showed it."""

    recording: Recording
    damping: Damping
    methods: tuple[Method, ...]

    @classmethod
    def of(cls, recording: Recording, seen: dict[Candidate, Trial], choice: Sequence[Method]) -> Surrogate:
        """Fitted to the real runs so far."""
        runs = [
            Seen(
                Skips(recording.axis, method, recording.response, wary=recording.whole).contributions(mask),
                -np.array(trial.psnr_db),
            )
            for (mask, method), trial in seen.items()
        ]
        return cls(recording, fit(recording.gram, runs), tuple(choice))

    @property
    def steps(self) -> int:
        """Of the loop."""
        return len(self.recording.axis)

    @functools.cached_property
    def skips(self) -> dict[Method, Skips]:
        """Per method, the weights of what is left out."""
        found, survival = self.recording, self.damping.survival(self.steps)
        return {
            m: Skips(found.axis, m, found.response, survival, self.damping.feedback, found.whole) for m in self.methods
        }

    @functools.cached_property
    def whole(self) -> np.ndarray:
        """One Gram matrix of all prompts [N, N], each weighed so that every other step left out costs it the same."""
        skips = self.skips[self.methods[-1]]
        every_other = tuple(t % 2 == 0 for t in range(self.steps))
        cost = squared(skips.combination(every_other), self.recording.gram)
        return np.asarray((self.recording.gram / cost[:, None, None]).mean(axis=0))

    def programs(self, longest: int) -> dict[Method, dict[int, Best]]:
        """Per method, the best schedule of every number of computed steps."""
        return {m: best_schedules(self.skips[m], self.whole, longest) for m in self.methods}

    def ends(self, computed: int) -> dict[Candidate, float]:
        """Per method, where descent from the program's schedule of so many steps ends: candidate -> loss in dB."""
        found: dict[Candidate, float] = {}
        for method, table in self.programs(self.longest(computed)).items():
            if computed in table:
                masks = descend(self.skips[method], self.recording.gram, table[computed].mask)
                found |= {(mask, method): loss for mask, loss in masks.items()}
        return found

    def near(self, candidate: Candidate) -> dict[Candidate, float]:
        """Neighbours of a candidate (one step swapped; another method) with their losses in dB."""
        mask, method = candidate
        around = list(swaps(mask))
        values = losses(self.skips[method], self.recording.gram, around) if around else np.empty(0)
        found: dict[Candidate, float] = {
            (other, method): loss for other, loss in zip(around, values.tolist(), strict=True)
        }
        return found | {(mask, other): self.loss((mask, other)) for other in self.methods if other != method}

    def loss(self, candidate: Candidate) -> float:
        """Mean over prompts of the squared error in dB."""
        mask, method = candidate
        return float(losses(self.skips[method], self.recording.gram, [mask])[0])

    def psnr_db(self, loss: float) -> float:
        """The mean PSNR that a loss means, by the real runs."""
        return -loss - float(np.mean(self.damping.gain_db or 0.0))

    def longest(self, computed: int) -> int:
        """How many steps may be left out in a row where so many are computed."""
        return min(self.steps, max(LONGEST, 3 * -(-self.steps // computed)))


def choices(corrects: bool, orders: Iterable[int] = (0, 1, 2), corrections: Iterable[int] = (0, 1, 2)) -> list[Method]:
    """The methods to try; without those that correct where the scheduler leaves no room for it."""
    return [m for m in methods(list(orders), list(corrections)) if corrects or not m.correct]
