"""EasyCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.accelerator import Target
from ..engine import CacheRecipe
from ..gates.easycache import RateGate
from ..policy import Policy
from ..scopes.denoiser import Denoiser
from .base import Extrapolating


@dataclass(frozen=True)
class EasyCache(Extrapolating):
    """Foretell the output's change from the input's; reuse output minus input while the foretold sum is small.

    E <- E + k |x_t - x_{t-1}| / |v_i|, hit while E < threshold, with k the rate |dv| / |dx| between the last two
    computed steps. Knows nothing of blocks: works on any denoiser, and remembers only latents. The conditional branch
    decides for both. Source: EasyCache (arXiv 2507.02860); published: 0.05 and 10 steps of warm-up on Wan, 0.025 and
    5 on HunyuanVideo.

    Attributes:
        threshold: budget of foretold relative change; 0: never.
    """

    threshold: float = 0.05
    warmup_steps: int = 5
    branches: str = "first"

    name: ClassVar[str] = "cache.easycache"

    def __post_init__(self) -> None:
        super().__post_init__()
        RateGate(self.threshold)

    def recipe(self, target: Target) -> CacheRecipe:
        """The whole denoiser, by its residual."""
        return CacheRecipe(Policy(RateGate(self.threshold), self.forecast(), self.guards()), Denoiser(residual=True))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """What decides."""
        return "the denoiser's input decides about the whole of it"
