"""How much of an error made at a step is left at the end: fitted to real runs, a smooth curve over the loop.

The surrogate of `skips.py` knows the scheduler, not the denoiser, which damps or amplifies what forecasts missed. What
real schedules cost in PSNR tells: log mean squared error of picture p in run r is taken to be

    decoder's gain of p + log c' G_p c,   c = c(survival, feedback) of the schedule (`Contributions.combination`),

with log survival linear between a few knots. Few runs are enough, since every one says something per prompt, and the
curve is held towards 1 where they say nothing. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .skips import Contributions, squared

KNOTS = 6
LOOSE, SMOOTH = 1.0, 0.5  # standard deviations of a knot, and of the change from knot to knot, in log survival
NOISE_DB = 3.0  # what the surrogate misses of a single picture's PSNR (measured on the image testbed: 3.4)
FEEDBACK, LOOSE_FEEDBACK = 0.1, 0.1
OUTLIER_DB = 9.0  # beyond it a picture's miss counts linearly: one that went wrong must not bend the curve
Residuals = Callable[[np.ndarray], np.ndarray]


class Seen(NamedTuple):
    """One real run: its schedule taken apart, and 10 log10 of each picture's mean squared error, [P]."""

    parts: Contributions
    error_db: np.ndarray


@dataclass(frozen=True)
class Damping:
    """What a fit came to: log survival at the knots, feedback, the decoder's gain per prompt in dB."""

    knots: tuple[float, ...] = (0.0,) * KNOTS
    feedback: float = FEEDBACK
    gain_db: tuple[float, ...] = ()
    missed_db: float = float("nan")  # root mean square over runs and prompts

    def survival(self, steps: int) -> np.ndarray:
        """s_t, [N]."""
        places = np.linspace(0, steps - 1, len(self.knots))
        return np.exp(np.interp(np.arange(steps), places, self.knots))


def fit(gram: np.ndarray, runs: Sequence[Seen], rounds: int = 25) -> Damping:
    """The damping that explains these runs best. `gram`: [P, N, N]; no run: none (survival 1)."""
    if not runs:
        return Damping()
    truth = np.stack([run.error_db for run in runs])  # [R, P]

    def residuals(theta: np.ndarray) -> np.ndarray:
        miss = truth - _predict(theta, gram, runs)
        miss = _robust(miss - miss.mean(axis=0)) / NOISE_DB
        held = (theta[:-1] / LOOSE, np.diff(theta[:-1]) / SMOOTH, (theta[-1:] - FEEDBACK) / LOOSE_FEEDBACK)
        return np.concatenate([miss.ravel(), *held])

    theta = _least_squares(residuals, np.array([*([0.0] * KNOTS), FEEDBACK]), rounds)
    miss = truth - _predict(theta, gram, runs)
    gain = miss.mean(axis=0)
    missed_db = float(np.sqrt(((miss - gain) ** 2).mean()))
    return Damping(tuple(theta[:-1].tolist()), float(theta[-1]), tuple(gain.tolist()), missed_db)


def _predict(theta: np.ndarray, gram: np.ndarray, runs: Sequence[Seen]) -> np.ndarray:
    """10 log10 c' G_p c per run and prompt, [R, P]."""
    survival = Damping(tuple(theta[:-1])).survival(gram.shape[-1])
    return np.asarray(10 * np.log10(squared(np.stack([r.parts.combination(survival, theta[-1]) for r in runs]), gram)))


def _robust(miss: np.ndarray) -> np.ndarray:
    """Residuals whose squares are Huber's loss."""
    size = np.abs(miss)
    return np.where(
        size <= OUTLIER_DB, miss, np.sign(miss) * np.sqrt(np.maximum(2 * OUTLIER_DB * size - OUTLIER_DB**2, 0))
    )


def _least_squares(residuals: Residuals, theta: np.ndarray, rounds: int) -> np.ndarray:
    """Levenberg's method with differences for derivatives: a handful of unknowns."""
    damp, now = 1e-2, residuals(theta)
    for _ in range(rounds):
        slope = np.stack([(residuals(theta + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(len(theta))], axis=1)
        step = np.linalg.solve(slope.T @ slope + damp * np.eye(len(theta)), -slope.T @ now)
        after = residuals(theta + step)
        if after @ after < now @ now:
            gained = now @ now - after @ after
            theta, now, damp = theta + step, after, damp / 3
            if gained < 1e-9 * (now @ now):
                break
        else:
            damp *= 4
    return theta
