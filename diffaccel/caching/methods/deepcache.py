"""DeepCache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...core.accelerator import Target
from ...extrapolation import schedule
from ..engine import CacheRecipe
from ..gates.schedule import ScheduleGate
from ..policy import Policy
from ..scopes.unet import Deep
from .base import Extrapolating


@dataclass(frozen=True)
class DeepCache(Extrapolating):
    """Compute every `interval`-th step; between them run only the shallow layers of a U-Net, on the old deep feature.

    Of a U-Net's features the deep ones change least from step to step. Source: DeepCache (arXiv 2312.00858), uniform
    1:N, counted from the first step of the loop; published: branch 0, interval 3 on SDXL and 5 on SD 1.5.

    Branches are numbered as its package does on U-Nets with three layers in each block of the up path (all Stable
    Diffusion): the skip connections, shallowest first. Branch 0 is the entry layer's, so that a reused step runs the
    entry layer and the last layer of the up path alone; branch b adds the first b layers of the down path
    (downsamplers count as layers) and as many of the up path.

    Attributes:
        interval: steps from one computed step to the next; 1: every step.
        branch: the deepest skip connection that runs on a reused step.
    """

    interval: int = 3
    branch: int = 0

    name: ClassVar[str] = "cache.deepcache"

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule.uniform(1, self.interval)
        Deep(self.branch)

    def off(self) -> str | None:
        """An interval of 1 computes everything."""
        return "interval 1: every step is computed" if self.interval == 1 else None

    def recipe(self, target: Target) -> CacheRecipe:
        """A static schedule on the deep part."""
        gate = ScheduleGate(partial(schedule.uniform, interval=self.interval))
        return CacheRecipe(Policy(gate, self.forecast(), self.guards()), Deep(self.branch))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """Which steps, of what."""
        return (
            f"all below skip connection {self.branch} is left out of all but one step of {self.interval}; "
            "steps are known before the loop"
        )
