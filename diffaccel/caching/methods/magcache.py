"""MagCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...core.accelerator import Target
from ..engine import CacheRecipe
from ..gates.base import check_threshold
from ..gates.magcache import MagnitudeGate, check_reach
from ..policy import Policy
from ..scopes.stack import Stack
from ..tables import magnitude_gate
from .base import Extrapolating, checkpoint


@dataclass(frozen=True)
class MagCache(Extrapolating):
    """Reuse the stack's residual while its length, known per model beforehand, has not drifted far.

    A <- A g_t, E <- E + |1 - A|, hit while E <= threshold and at most `max_steps` in a row; steps are known before
    the loop. Source: MagCache (arXiv 2506.09045); ratios in tables/magcache.json with their sources.

    Attributes:
        threshold: drift up to which a step is reused; None: the table's own for this model. 0: never.
        ratios: "auto" (those of this checkpoint, by its name, or a refusal), the name of a table entry, or one ratio
            of residual lengths per calibrated step.
        max_steps: most reused steps in a row; None: the table's own (3 with ratios of your own).
        retention: share of the steps at the start that is always computed; None: the table's own (0.2).
    """

    threshold: float | None = None
    ratios: str | Sequence[float] = "auto"
    max_steps: int | None = None
    retention: float | None = None

    name: ClassVar[str] = "cache.magcache"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold(self, optional=True)
        check_reach(self, optional=True)
        if self.ratios != "auto":
            self._gate(None)

    def _gate(self, model: str | None, family: str | None = None) -> MagnitudeGate:
        given = {"threshold": self.threshold, "max_steps": self.max_steps, "retention": self.retention}
        options = {name: value for name, value in given.items() if value is not None}
        return magnitude_gate(self.ratios, model, family, **options)

    def recipe(self, target: Target) -> CacheRecipe:
        """The published gate with our guard on the last step (the published method has none)."""
        gate = self._gate(checkpoint(target), target.spec.family)
        return CacheRecipe(Policy(gate, self.forecast(), self.guards()), Stack(0))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """Which numbers are used."""
        gate = recipe.policy.gate
        assert isinstance(gate, MagnitudeGate)
        return f"{len(gate.ratios)} ratios, threshold {gate.threshold:g}; steps are known before the loop"
