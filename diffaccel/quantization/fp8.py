"""FP8: weights (and activations) as 8-bit floating-point numbers with scales, in place on a live pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core.options import choose_name
from ..ledger.hardware import Hardware
from .backends import AUTO, NATIVE, TORCHAO, Recipe
from .base import QuantizedWeights
from .formats import FP8
from .weights import DYNAMIC, STORAGE, WEIGHT_ONLY

SCHEMES = (DYNAMIC, WEIGHT_ONLY, STORAGE)
FIRST_CAPABILITY = (8, 9)  # of CUDA devices with FP8 matrix units


@dataclass(frozen=True)
class Fp8(QuantizedWeights):
    """E4M3 weights of half the bytes, with scales always.

    Attributes:
        scheme: "dynamic" (activations are quantized per call and the product is one of 8-bit factors: faster on GPUs
            from compute capability 8.9 on; on older ones "weight_only" is used instead, and the plan says so; on a
            CPU it runs with the same numbers, slowly), "weight_only" (products in the model's dtype) or "storage"
            (dequantized before each use; takes convolutions in the blocks too).
        granularity: "row" (a scale per output channel, and per token for "dynamic") or "tensor" (one scale; in a batch
            the samples then depend on each other in their last bits).
        backend: "native" (diffaccel's own, also what "auto" takes), "torchao" or "quanto".

    Raises:
        InvalidOptionError: a value that is not allowed, or that the backend cannot do.
    """

    scheme: str = DYNAMIC
    granularity: str = "row"
    backend: str = AUTO

    name: ClassVar[str] = "quantization.fp8"

    def __post_init__(self) -> None:
        choose_name(self, "scheme", SCHEMES)
        choose_name(self, "granularity", ("row", "tensor"))
        super().__post_init__()

    def recipe(self, hardware: Hardware | None) -> Recipe:
        """FP8 codes; dynamic becomes weight-only on a GPU without FP8 units."""
        scheme = WEIGHT_ONLY if hardware is not None and self._lacks_units(hardware) else self.scheme
        return Recipe(FP8, scheme, self.granularity == "row", NATIVE if self.backend == AUTO else self.backend)

    def _lacks_units(self, hardware: Hardware) -> bool:
        old = hardware.kind == "cuda" and (hardware.capability or (0, 0)) < FIRST_CAPABILITY
        return self.scheme == DYNAMIC and self.backend != TORCHAO and (old or hardware.may.fp8 != DYNAMIC)

    def _refused_by(self, recipe: Recipe, hardware: Hardware) -> str | None:
        if not hardware.may.fp8:
            return f"torch has no 8-bit floating point on {hardware}: take quantization='int8'"
        young = hardware.kind == "cuda" and (hardware.capability or (0, 0)) >= FIRST_CAPABILITY
        if recipe.backend != TORCHAO or recipe.scheme != DYNAMIC or young:
            return None
        return (
            f"torchao's dynamic FP8 needs a GPU of compute capability 8.9 or later, and this is {hardware}: take "
            "backend='native', or scheme='weight_only'"
        )

    def says(self, hardware: Hardware) -> str:
        """The arithmetic in a few words."""
        recipe = self.recipe(hardware)
        text = f"FP8 {recipe.scheme} per {self.granularity} by {recipe.backend}"
        if self._lacks_units(hardware):
            units = "has no FP8 units, from compute capability 8.9 on"
            why = units if hardware.kind == "cuda" else "is no CUDA device, the only ones whose FP8 units are used"
            return f"{text} (asked for dynamic, but {hardware} {why})"
        if recipe.scheme == DYNAMIC and hardware.kind == "cpu":
            return f"{text} (on a CPU: the numbers of a GPU, no gain in speed)"
        return text
