"""TeaCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...core.accelerator import Target
from ...errors import InvalidOptionError, UnsupportedModelError
from ..engine import CacheRecipe
from ..gates.base import MODULATED, TIME, check_threshold
from ..policy import Policy
from ..scopes.stack import Stack
from ..tables import PolynomialSet, polynomial_set
from .base import Extrapolating, checkpoint


@dataclass(frozen=True)
class TeaCache(Extrapolating):
    """Add up the rescaled change of the first block's modulated input; reuse the whole stack while the sum is small.

    Hit while a < threshold, with a <- a + p(|m_t - m_{t-1}| / |m_{t-1}|) and p a polynomial fitted per model; a
    computed step sets a to 0. On models whose gate tensor is the time embedding (Wan, CogVideoX) the steps are known
    before the loop. Source: TeaCache (arXiv 2411.19108); coefficients in tables/teacache.json with their sources.

    Attributes:
        threshold: budget of accumulated change; None: the table's own for this model. 0: never.
        coefficients: "auto" (the calibrated set of this checkpoint, by its name, or a refusal), the name of a table
            entry, or the polynomial's numbers, highest power first.
    """

    threshold: float | None = None
    coefficients: str | Sequence[float] = "auto"

    name: ClassVar[str] = "cache.teacache"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold(self, optional=True)
        if self.coefficients != "auto":
            polynomial_set(self.coefficients)

    def _numbers(self, target: Target) -> PolynomialSet:
        numbers = polynomial_set(self.coefficients, checkpoint(target), target.spec.family)
        if not isinstance(self.coefficients, str):  # a set of the user's own: for what this family's gate looks at
            spec = target.spec
            time = spec.time_embedding is not None and spec.modulated is None
            numbers = replace(numbers, observes=TIME if time else MODULATED)
        return numbers

    def recipe(self, target: Target) -> CacheRecipe:
        """The published gate, warm-up and last steps."""
        numbers = self._numbers(target)
        if numbers.observes not in (MODULATED, TIME):
            raise UnsupportedModelError(f"TeaCache set {numbers.name!r} is for a gate that diffusers' model has not")
        threshold = numbers.default_threshold if self.threshold is None else self.threshold
        if threshold is None:
            raise InvalidOptionError(
                f"the TeaCache set {numbers.name!r} has no usual threshold: give cache_threshold="
            )
        guards = self.guards(
            warmup_steps=max(self.warmup_steps, numbers.first_steps),
            last_steps=max(self.last_steps, numbers.last_steps),
        )
        return CacheRecipe(Policy(numbers.gate(threshold), self.forecast(), guards), Stack(0))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """Which numbers are used."""
        numbers = self._numbers(target)
        known = "; steps are known before the loop" if numbers.observes == TIME else ""
        return f"coefficients {numbers.name!r}, threshold {recipe.policy.gate.threshold:g}{known}"  # type: ignore[attr-defined]
