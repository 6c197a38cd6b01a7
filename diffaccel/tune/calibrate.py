"""From the adaptive cache's tolerance to PSNR, on one pipeline: a line through decibels, and a bound per picture.

Every prompt runs alone, as a user would run it, at a few tolerances. The mean over prompts is a line in log tolerance;
what single prompts fall below it is kept, so that a one-sided bound for a new prompt can be read off by a conformal
quantile: no better is to be had, since the decoder's gain differs by picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .runs import CAP_DB, Ground, Trial
from .statistics import Line, fit_line

TOLERANCES = (0.001, 0.002, 0.004, 0.008, 0.016)


def wishes_for(tolerance: float, steps: int) -> dict[str, object]:
    """The adaptive cache as overrides of `accelerate`."""
    return {"cache": "adaptive", "cache_tolerance": tolerance, "cache_min_steps": min(9, steps)}


@dataclass(frozen=True)
class Calibration:
    """What tolerances came to: mean computed steps of each, and PSNR in dB, [P prompts, K tolerances]."""

    tolerances: tuple[float, ...]
    computed: tuple[float, ...]
    psnr_db: np.ndarray
    line: Line

    @classmethod
    def of(cls, trials: Mapping[float, Trial]) -> Calibration | None:
        """From one trial per tolerance; None where fewer than two of them changed any picture."""
        used = {t: trial for t, trial in sorted(trials.items()) if min(trial.psnr_db) < CAP_DB}
        if len(used) < 2:
            return None
        table = np.array([trial.psnr_db for trial in used.values()]).T
        computed = tuple(trial.computed for trial in used.values())
        return cls(tuple(used), computed, table, fit_line(list(used), table))

    def tolerance_for(self, psnr_db: float, miss: float | None = 0.1) -> float:
        """The tolerance at which a new prompt falls below this PSNR with a probability of at most `miss` (None: at
        which the mean is this); 0 where the prompts are too few to promise it."""
        return self.line.knob_for(psnr_db, miss)

    def table(self) -> dict[str, Any]:
        """The table [calibration] of a preset; `read` is the inverse."""
        return {
            "tolerances": list(self.tolerances),
            "computed_steps": [round(value, 2) for value in self.computed],
            "psnr_db": [[round(value, 2) for value in row] for row in self.psnr_db.tolist()],
            "psnr_at_one_db": round(self.line.at_one, 3),
            "psnr_per_decade_db": round(self.line.per_decade, 3),
            "lowest_residuals_db": [round(min(row), 2) for row in self.line.residuals],
        }

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Calibration:
        """From the table of a preset."""
        values = np.array(table["psnr_db"], dtype=float)
        line = fit_line(table["tolerances"], values)
        return cls(tuple(table["tolerances"]), tuple(table["computed_steps"]), values, line)


def calibrate(ground: Ground, tolerances: Sequence[float] = TOLERANCES) -> Calibration | None:
    """Run every prompt by itself at every tolerance."""
    alone = ground.one_by_one()
    steps = len(ground.recording().axis)
    return Calibration.of({t: alone.accelerated(wishes_for(t, steps)) for t in tolerances})
