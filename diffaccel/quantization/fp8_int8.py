"""FP8 and INT8: weights (and activations) in 8 bits with scales, in place on a live pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.compat import int8_units
from ..core.options import choose_name
from ..ledger.hardware import Hardware
from .backends import AUTO, NATIVE, TORCHAO, Recipe
from .base import QuantizedWeights
from .formats import FP8
from .weights import DYNAMIC, STORAGE, WEIGHT_ONLY

FP8_SCHEMES = (DYNAMIC, WEIGHT_ONLY, STORAGE)
FP8_CAPABILITY = (8, 9)  # of CUDA devices with FP8 matrix units
INT8_SCHEMES = (DYNAMIC, WEIGHT_ONLY)
INT8_CAPABILITY = (8, 0)  # of CUDA devices on which torch._int_mm is fast


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
        choose_name(self, "scheme", FP8_SCHEMES)
        choose_name(self, "granularity", ("row", "tensor"))
        super().__post_init__()

    def recipe(self, hardware: Hardware | None) -> Recipe:
        """FP8 codes; dynamic becomes weight-only on a GPU without FP8 units."""
        scheme = WEIGHT_ONLY if hardware is not None and self._lacks_units(hardware) else self.scheme
        return Recipe(FP8, scheme, self.granularity == "row", NATIVE if self.backend == AUTO else self.backend)

    def _lacks_units(self, hardware: Hardware) -> bool:
        old = hardware.kind == "cuda" and (hardware.capability or (0, 0)) < FP8_CAPABILITY
        return self.scheme == DYNAMIC and self.backend != TORCHAO and (old or hardware.may.fp8 != DYNAMIC)

    def _refused_by(self, recipe: Recipe, hardware: Hardware) -> str | None:
        if not hardware.may.fp8:
            return f"torch has no 8-bit floating point on {hardware}: take quantization='int8'"
        young = hardware.kind == "cuda" and (hardware.capability or (0, 0)) >= FP8_CAPABILITY
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


@dataclass(frozen=True)
class Int8(QuantizedWeights):
    """Symmetric INT8 weights of half the bytes, a scale per output channel.

    Attributes:
        scheme: "dynamic" (activations are quantized per token and call; compiled on a CPU with AMX 1.08 to 0.80 times
            the speed of bf16 at 512 to 4096 tokens, measured) or "weight_only" (products in the model's dtype).
        backend: "native" (diffaccel's own, also what "auto" takes), "torchao" or "quanto".

    Raises:
        InvalidOptionError: a value that is not allowed, or that the backend cannot do.
    """

    scheme: str = DYNAMIC
    backend: str = AUTO

    name: ClassVar[str] = "quantization.int8"

    def __post_init__(self) -> None:
        choose_name(self, "scheme", INT8_SCHEMES)
        super().__post_init__()

    def recipe(self, hardware: Hardware | None) -> Recipe:
        """INT8 codes, one scale per row; dynamic becomes weight-only where torch's product of integers is not used."""
        scheme = WEIGHT_ONLY if hardware is not None and self._lacks_product(hardware) else self.scheme
        return Recipe(torch.int8, scheme, True, NATIVE if self.backend == AUTO else self.backend)

    def _lacks_product(self, hardware: Hardware) -> bool:
        return self.scheme == DYNAMIC and hardware.may.int8 != DYNAMIC

    def says(self, hardware: Hardware) -> str:
        """The arithmetic in a few words, and whether it can gain time here."""
        recipe = self.recipe(hardware)
        text = f"INT8 {recipe.scheme} per row by {recipe.backend}"
        if self._lacks_product(hardware):
            return f"{text} (asked for dynamic, but products of integers are not used on {hardware})"
        if recipe.scheme != DYNAMIC:
            return text
        if hardware.kind == "cpu" and not int8_units():
            return f"{text} (this processor has no INT8 matrix units, AMX or VNNI: fewer bytes, no gain in speed)"
        if hardware.kind == "cuda" and (hardware.capability or (0, 0)) < INT8_CAPABILITY:
            return f"{text} (no gain in speed is to be expected below compute capability 8.0)"
        return text
