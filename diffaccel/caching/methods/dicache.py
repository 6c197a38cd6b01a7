"""DiCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.accelerator import Target
from ...core.options import GOT, take, whole
from ..engine import CacheRecipe
from ..gates.dicache import ProbeAligned, ProbeSumGate
from ..policy import Policy
from ..scopes.stack import Stack
from .base import StepCache, counted


@dataclass(frozen=True)
class DiCache(StepCache):
    """Add up the change of the first blocks' output; reuse the rest, aligned along the way the probe has gone.

    e <- e + d(y_t, y_{t-1}), hit while e < threshold; on a hit R = R_j + gamma (R_i - R_j), gamma from the probe's
    own residuals, between 1 and 1.5. A computed step goes on behind the probe.
    Source: DiCache (arXiv 2508.17356); published thresholds 0.4 FLUX, 0.1 HunyuanVideo, 0.08 Wan, first 20 % computed.

    Attributes:
        threshold: budget of accumulated change; 0: never.
        probe_blocks: blocks at the start of the stack that always run.
        measure: "output" (change of the probe's output), or "difference" (that less the change of its input).
    """

    threshold: float = 0.1
    probe_blocks: int = 1
    measure: str = "output"
    start: float = 0.2

    name: ClassVar[str] = "cache.dicache"

    def __post_init__(self) -> None:
        super().__post_init__()
        ProbeSumGate(self.threshold, measure_of=self.measure)
        take(self, whole(1), "probe_blocks", form=GOT)

    def recipe(self, target: Target) -> CacheRecipe:
        """A probe, and a forecast that follows it."""
        gate = ProbeSumGate(self.threshold, measure_of=self.measure)
        return CacheRecipe(Policy(gate, ProbeAligned(), self.guards()), Stack(self.probe_blocks))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """What decides."""
        return f"{self.probe_blocks} block(s) of {counted(self, target)} decide about the rest"
