"""Which config class stands behind each value of each place: the one registry line of a lever."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .places import CACHES, KERNELS, SPARSE


@dataclass(frozen=True)
class Lever:
    """A config class by its place in the package (imported when first asked for), and the fields a value fixes."""

    module: str
    name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> type[Any]:
        """The class."""
        found: type[Any] = getattr(importlib.import_module(f"diffaccel.{self.module}"), self.name)
        return found


@dataclass(frozen=True)
class CacheMethod(Lever):
    """A method of the cache registry."""

    def config(self) -> type[Any]:
        """The class."""
        from ..caching.methods import METHODS

        return METHODS[self.name]


LEVERS: Mapping[str, Mapping[str, Lever]] = {
    "attention": {
        **{name: Lever("attention.choice", "AttentionBackend", {"backend": name}) for name in KERNELS},
        "sage": Lever("attention.sage.config", "SageAttention"),
        **{name: Lever("attention.sparse.config", "SparseAttention", {"method": name}) for name in SPARSE},
        "sparse_auto": Lever("attention.sparse.config", "SparseAttention", {"method": "auto"}),
        "custom": Lever("attention.sparse.config", "SparseAttention"),
    },
    "cache": {name: CacheMethod("caching.methods", name) for name in CACHES},
    "compile": {"True": Lever("compilation.regional", "RegionalCompile")},
    "guidance": {"reuse": Lever("guidance.reuse", "GuidanceReuse")},
    "lora": {"True": Lever("quantization.lora.lever", "Lora")},
    "offload": {
        "layerwise": Lever("offload.layerwise.config", "LayerwiseOffload"),
        "stage": Lever("offload.stage.config", "StageOffload"),
    },
    "quantization": {
        "fp8": Lever("quantization.fp8", "Fp8"),
        "int8": Lever("quantization.int8", "Int8"),
        "svdquant": Lever("quantization.svdquant", "SvdQuant"),
    },
    "vae_tiling": {
        "blended": Lever("vae.blended.config", "VaeTiling"),
        "exact": Lever("vae.exact.config", "ExactVae"),
    },
}
