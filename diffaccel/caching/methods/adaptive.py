"""Step control as a cache: the package's own method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.accelerator import Target, Verdict
from ...core.options import GOT, above, number, one_of, take, whole
from ...errors import InvalidOptionError
from ...extrapolation.forecast import Forecast
from ..dial import TOLERANCE
from ..engine import CacheRecipe
from ..fidelity import TABLE, Fit
from ..gates.steered import SteeredGate
from ..levels import why_never
from ..policy import Policy
from ..scopes.denoiser import Denoiser
from ..steering import StepRules
from .base import StepCache

AUTO = "auto"
INSTEAD = "caches that only reuse act there: cache='first_block' on transformers, 'deepcache' on U-Nets"


@dataclass(frozen=True)
class AdaptiveCache(StepCache):
    """Chooses its own steps: at each computed one the error of its forecast says how far the next ones may go.

    What the sampler is given at reused steps is extrapolated along the noise levels, and once the next output is known
    the sampler goes back and takes them again with interpolated outputs. No probe, no calibration, no block runs at a
    reused step and nothing waits for the device there. Mathematics: `extrapolation.step_control`.

    Attributes:
        tolerance: what the forecasts of one gap may move the latents by, relative to the model's own scale; 0: every
            step is computed. 0.002 computes about half of 28 steps, 0.01 a third. Unless told, the one of the level
            (`caching.dial`): "balanced" where nobody chose one.
        order: of the forecasts, 0 to 3, or "auto": whichever would have been best at the last computed step.
        correct: order with which the skipped steps are interpolated afterwards, 0 (not at all) to 3, or "auto".
        max_gap: at least every so many steps one is computed; None: 0.28 of the loop's steps (8 of 28).
        max_steps: computed steps of a loop at most, the tolerance being raised until they suffice; None: no limit.
        max_seconds: from the call to the last step, at the pace of the first computed steps; None: no limit. Decoding
            comes on top.
        min_psnr_db: takes the place of `tolerance`: nine pictures of ten lie above it (to the plain run), by
            `calibration`, and more is computed where a picture's gaps cost more than foreseen; None: no such wish.
        calibration: level, slope and margin in dB as `diffaccel tune` measures them on a checkpoint
            (`caching.fidelity.Fit`); None: the trained testbeds' table.
        last_steps: as for all caches, but 0 unless told: the last step is reused where its forecast costs little.
    """

    tolerance: float = TOLERANCE
    order: int | str = AUTO
    correct: int | str = AUTO
    max_gap: int | None = None
    max_steps: int | None = None
    max_seconds: float | None = None
    min_psnr_db: float | None = None
    calibration: tuple[float, ...] | None = None
    last_steps: int = 0

    name: ClassVar[str] = "cache.adaptive"

    def __post_init__(self) -> None:
        super().__post_init__()
        take(self, number(0), "tolerance", form=GOT)
        take(self, one_of(AUTO, 0, 1, 2, 3), "order", "correct", form=GOT)
        take(self, whole(1).or_none(), "max_gap", form=GOT)
        take(self, whole(3).or_none(), "max_steps", form=GOT)
        take(self, above(0).or_none(), "max_seconds", "min_psnr_db", form=GOT)
        self.fit()
        if self.max_bytes is not None:
            raise InvalidOptionError(
                'max_bytes is not for cache="adaptive": it holds a few latents, whatever the model'
            )
        if self.branches != "each":
            raise InvalidOptionError('branches="first" is not for cache="adaptive": its branches share one decision')

    def fit(self) -> Fit:
        """How tolerances go with PSNR."""
        if self.calibration is None:
            return TABLE
        if len(self.calibration) != 3:
            raise InvalidOptionError(f"calibration must be level, slope and margin in dB, got {self.calibration!r}")
        return Fit(*self.calibration)

    def off(self) -> str | None:
        """Why these parameters turn the cache off, or None."""
        return "tolerance 0: every step is computed" if self.tolerance == 0 else None

    def check(self, target: Target) -> Verdict:
        """As all caches; and a scheduler that step control can follow."""
        verdict = super().check(target)
        scheduler = getattr(target.pipe, "scheduler", None)
        reason = why_never(scheduler) if verdict.ok and scheduler is not None and self.off() is None else None
        return verdict if reason is None else Verdict.no(f"{reason}; {INSTEAD}")

    def recipe(self, target: Target) -> CacheRecipe:
        """The whole denoiser, led by the run's control."""
        order, correct = (None if value == AUTO else int(value) for value in (self.order, self.correct))
        steps = StepRules(
            float(self.tolerance),
            order,
            correct,
            max_gap=self.max_gap,
            max_steps=self.max_steps,
            fit=self.fit(),
            min_psnr_db=self.min_psnr_db,
            max_seconds=self.max_seconds,
            per_sample=self.per_sample,
        )
        policy = Policy(SteeredGate(), Forecast(1, coordinate="step"), self.guards())
        return CacheRecipe(policy, Denoiser(), steps=steps)

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """What it does."""
        aim = f"a tolerance of {self.tolerance:g}"
        if self.min_psnr_db is not None:
            origin = "the testbeds' table" if self.calibration is None else "this checkpoint's calibration"
            aim = f"{self.min_psnr_db:g} dB by {origin}: a tolerance of {self.fit().tolerance(self.min_psnr_db):.3g}"
        limits = [f"at most {self.max_steps} steps"] if self.max_steps is not None else []
        limits += [f"at most {self.max_seconds:g} s to the last step"] if self.max_seconds is not None else []
        return ", ".join([f"computes the steps its own forecast error asks for, to {aim}", *limits])
