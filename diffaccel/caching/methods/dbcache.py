"""DBCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...core.accelerator import Target
from ...core.options import GOT, one_of, take, whole
from ...errors import InvalidOptionError
from ...extrapolation.forecast import Forecast
from ...extrapolation.schedule import check_form
from ..engine import CacheRecipe
from ..gates.base import ProbeGate
from ..guards import POLICIES
from ..policy import Policy
from ..scopes.stack import Stack
from ..tables import load_table
from .base import Extrapolating, counted


@dataclass(frozen=True)
class DBCache(Extrapolating):
    """The first `front_blocks` decide, the last `back_blocks` always run, and the residual of those between is reused.

    As First-Block Cache with more of the model kept running, and more guards; with `order` above 0 the residual is
    forecast (cache-dit's TaylorSeer calibrator is basis="ladder"). Checked in this order: warm-up, last steps, mask,
    caps, accumulated change, threshold. A threshold of 1 or more reuses without a test.
    Source: DBCache of cache-dit (1.5.3), there with F, B, R, W, MC, M; its defaults are F8 B0 R0.08 W8.

    Attributes:
        threshold: relative change of the front blocks' residual below which a step is reused; 0: never.
        front_blocks, back_blocks: blocks at either end of the stack that always run.
        probe_order: order with which the probe itself is forecast before it is compared; 0: as published.
        max_accumulated: once the compared changes add up to this, everything is computed; None: no limit.
        steps_mask: which steps are computed: a string of 0 and 1, flags, a list of steps, or a published mask
            ("slow", "medium", "fast", "ultra", for the numbers of steps that cache-dit generated).
        steps_policy: what 0 in the mask means: "dynamic" asks the gate, "static" reuses without a test.
        warmup_interval: of the warm-up steps only every such one is computed for sure.
    """

    threshold: float = 0.08
    front_blocks: int = 8
    back_blocks: int = 0
    probe_order: int = 0
    max_accumulated: float | None = None
    steps_mask: str | Sequence[int] | None = None
    steps_policy: str = "dynamic"
    warmup_interval: int = 1
    warmup_steps: int = 8

    name: ClassVar[str] = "cache.dbcache"

    def __post_init__(self) -> None:
        super().__post_init__()
        take(self, one_of(0, 1, 2, 3), "probe_order", form=GOT)
        take(self, whole(1), "front_blocks", form=GOT)
        take(self, whole(0), "back_blocks", form=GOT)
        self._gate()
        self.guards(
            max_accumulated=self.max_accumulated, policy=self.steps_policy, warmup_interval=self.warmup_interval
        )
        if self.steps_policy not in POLICIES:
            raise InvalidOptionError(f"steps_policy must be one of {', '.join(POLICIES)}, got {self.steps_policy!r}")
        published = isinstance(self.steps_mask, str) and self.steps_mask in _published()
        if self.steps_mask is not None and not published:
            check_form(self.steps_mask)

    def _gate(self) -> ProbeGate:
        return ProbeGate(self.threshold, Forecast(self.probe_order, self.basis, self.coordinate))

    def recipe(self, target: Target) -> CacheRecipe:
        """A first-block cache with more blocks."""
        guards = self.guards(
            max_accumulated=self.max_accumulated,
            mask=self.steps_mask,
            policy=self.steps_policy,
            warmup_interval=self.warmup_interval,
        )
        scope = Stack(self.front_blocks, self.back_blocks)
        return CacheRecipe(Policy(self._gate(), self.forecast(), guards), scope)

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """What decides."""
        always = f", {self.back_blocks} more always run" if self.back_blocks else ""
        return f"{self.front_blocks} block(s) of {counted(self, target)} decide about the rest{always}"


def _published() -> list[str]:
    return list(load_table("steps_masks")["masks"]["28"])
