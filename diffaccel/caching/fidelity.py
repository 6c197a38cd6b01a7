"""How near to the plain picture a tolerance comes: a straight line in its logarithm, and a margin below it.

`Fit` is the answer of a calibration: PSNR in dB is about level - slope * log10(price), where the price of a picture is
the root mean square of what its gaps really cost (`Track.price`), and nine pictures of ten lie above that less the
margin (a one-sided conformal quantile: Vovk et al., Algorithmic Learning in a Random World). `TABLE` was fitted on
pictures of all trained testbeds together; the margin is that of the world that was left out when it was worst.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.options import NUMBER, above, take

EXACT_DB = 100.0  # what is said of a picture in which nothing was reused


@dataclass(frozen=True)
class Fit:
    """level and margin in dB, slope in dB per factor of ten; see the module."""

    level: float
    slope: float
    margin: float

    def __post_init__(self) -> None:
        take(self, NUMBER, "level", "margin")
        take(self, above(0), "slope")

    def estimate_db(self, price: float | None) -> float:
        """The PSNR to expect of a picture of this price."""
        return EXACT_DB if not price else min(EXACT_DB, self.level - self.slope * math.log10(price))

    def bound_db(self, price: float | None) -> float:
        """What nine of ten such pictures reach."""
        return EXACT_DB if not price else min(EXACT_DB, self.estimate_db(price) - self.margin)

    def tolerance(self, target_db: float) -> float:
        """The tolerance whose bound is at the target."""
        return float(10 ** ((self.level - self.margin - target_db) / self.slope))


# benchmarks/adaptive_fidelity.py
TABLE = Fit(level=13.59, slope=17.64, margin=11.72)


def fit(prices: Sequence[float], psnr_db: Sequence[float], share: float = 0.9) -> Fit:
    """Least squares of PSNR over log10(price), with the margin that `share` of the pictures keep.

    The margin is the ceil((n + 1) share)-th largest shortfall, so that it holds for one more picture of the kind; with
    fewer pictures than that needs it is the largest. Raises ValueError for fewer than three, or for one price alone.
    """
    xs = [math.log10(price) for price in prices]
    count = len(xs)
    if count < 3 or len(psnr_db) != count or max(xs) - min(xs) < 1e-6:
        raise ValueError("a fit needs at least three pictures at two prices")
    mean_x, mean_y = sum(xs) / count, sum(psnr_db) / count
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = -sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, psnr_db, strict=True)) / spread
    slope = max(slope, 1.0)  # a flat line would say that any tolerance does
    level = mean_y + slope * mean_x
    short = sorted(level - slope * x - y for x, y in zip(xs, psnr_db, strict=True))
    return Fit(level, slope, max(short[min(count - 1, math.ceil((count + 1) * share) - 1)], 0.0))
