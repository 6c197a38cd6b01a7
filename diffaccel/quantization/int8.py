"""INT8: weights (and activations) as 8-bit integers with scales, in place on a live pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.compat import int8_units
from ..core.options import choose_name
from ..ledger.hardware import Hardware
from .backends import AUTO, NATIVE, Recipe
from .base import QuantizedWeights
from .weights import DYNAMIC, WEIGHT_ONLY

SCHEMES = (DYNAMIC, WEIGHT_ONLY)
FIRST_CAPABILITY = (8, 0)  # of CUDA devices on which torch._int_mm is fast


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
        choose_name(self, "scheme", SCHEMES)
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
        if hardware.kind == "cuda" and (hardware.capability or (0, 0)) < FIRST_CAPABILITY:
            return f"{text} (no gain in speed is to be expected below compute capability 8.0)"
        return text
