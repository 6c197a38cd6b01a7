"""SeaCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.accelerator import Target
from ...core.options import GOT, NUMBER, take
from ..engine import CacheRecipe
from ..gates.base import check_threshold
from ..gates.seacache import SpectralGate
from ..policy import Policy
from ..scopes.stack import Stack
from .base import Extrapolating

FRAMED = ("BCFHW", "BFCHW", "list")


@dataclass(frozen=True)
class SeaCache(Extrapolating):
    """Add up the change of what a linear denoiser would keep of the latents; reuse the stack while the sum is small.

    The latents are filtered on their grid by the optimal linear denoiser of the step's noise level. Needs flow
    matching. Source: SeaCache (arXiv 2602.18993); latents as gate tensor, order 1, one step of warm-up and at most
    two reused steps in a row as in diffusers.

    Attributes:
        threshold: budget of accumulated change; 0: never.
        power: exponent of the signal's spectrum; None: 3 for video, 2 for pictures.
    """

    threshold: float = 0.25
    power: float | None = None
    order: int = 1
    max_consecutive: int | None = 2
    warmup_steps: int = 1

    name: ClassVar[str] = "cache.seacache"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold(self)
        take(self, NUMBER.or_none(), "power", form=GOT)

    def recipe(self, target: Target) -> CacheRecipe:
        """The filtered gate on the stack's residual."""
        power = self.power if self.power is not None else 3.0 if target.spec.layout in FRAMED else 2.0
        return CacheRecipe(Policy(SpectralGate(self.threshold, power=power), self.forecast(), self.guards()), Stack(0))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """What decides."""
        return "the filtered latents decide about all blocks"
