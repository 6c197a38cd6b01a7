"""AdaCache (whole stack)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...core.accelerator import Target
from ..engine import CacheRecipe
from ..gates.adacache import CODEBOOK_30_FAST, RatesGate
from ..policy import Policy
from ..scopes.stack import Stack
from .base import Extrapolating


@dataclass(frozen=True)
class AdaCache(Extrapolating):
    """AdaCache (whole stack): each computed step's change sets how many steps pass until the next computed one.

    The whole stack's residual is watched and reused. The paper watches and reuses the attention of each layer, and
    scales the change by a motion term; neither is part of this.
    Source: AdaCache (arXiv 2411.02397); code books are published for Open-Sora only, so
    those here are starting points and not calibrated for any model of diffusers.

    Attributes:
        codebook: relative change per step below the key -> steps until the next computed one.
    """

    codebook: Mapping[float, int] | None = None

    name: ClassVar[str] = "cache.adacache"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gate()

    def _gate(self) -> RatesGate:
        book = CODEBOOK_30_FAST if self.codebook is None else self.codebook
        pairs = tuple(book.items()) if isinstance(book, Mapping) else book
        return RatesGate(pairs)

    def recipe(self, target: Target) -> CacheRecipe:
        """The gate on the stack's residual."""
        return CacheRecipe(Policy(self._gate(), self.forecast(), self.guards()), Stack(0))

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """What decides."""
        return "AdaCache (whole stack): the last computed step's change decides how many steps are left out"
