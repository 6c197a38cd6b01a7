"""Who makes the quantized weight: diffaccel itself, torchao, or optimum-quanto. Each turns a weight into a tensor
subclass that an ordinary nn.Linear computes with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from . import formats
from .weights import DYNAMIC, WEIGHT_ONLY, ScaledWeight

NATIVE, TORCHAO, QUANTO, AUTO = "native", "torchao", "quanto", "auto"
BACKENDS = (AUTO, NATIVE, QUANTO, TORCHAO)
PACKAGES = {TORCHAO: "torchao", QUANTO: "optimum.quanto"}
INSTALL = {TORCHAO: "pip install torchao", QUANTO: "pip install optimum-quanto"}

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """What a weight is to become: `kind` (formats.FP8 or torch.int8), `scheme`, one scale per row or one for all."""

    kind: torch.dtype
    scheme: str
    rows: bool = True
    backend: str = NATIVE

    def convert(self, weight: torch.Tensor) -> torch.Tensor:
        """The quantized form of a weight, on the same device."""
        return _MAKERS[self.backend](self, weight.detach())


def installed(backend: str) -> bool:
    """Is the package of a backend here?"""
    package = PACKAGES.get(backend)
    try:
        return package is None or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _native(recipe: Recipe, weight: torch.Tensor) -> torch.Tensor:
    return ScaledWeight.of(weight, recipe.kind, recipe.scheme, recipe.rows)


def _torchao(recipe: Recipe, weight: torch.Tensor) -> torch.Tensor:
    """torchao quantizes modules: a bare Linear around the weight is made for the purpose, and left."""
    import torchao.quantization as ao

    fp8 = recipe.kind is formats.FP8
    if recipe.scheme == DYNAMIC:
        grain = ao.PerRow() if recipe.rows else ao.PerTensor()
        config = (
            ao.Float8DynamicActivationFloat8WeightConfig(granularity=grain)
            if fp8
            else ao.Int8DynamicActivationInt8WeightConfig()
        )
    else:
        config = ao.Float8WeightOnlyConfig() if fp8 else ao.Int8WeightOnlyConfig()
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    ao.quantize_(layer, config)
    return layer.weight.detach()


def _quanto(recipe: Recipe, weight: torch.Tensor) -> torch.Tensor:
    """Weights only: quanto's quantized activations need a calibration, and without one are garbage."""
    from optimum.quanto import AbsmaxOptimizer, qfloat8, qint8, quantize_weight

    qtype = qfloat8 if recipe.kind is formats.FP8 else qint8
    scale = AbsmaxOptimizer()(weight, qtype=qtype, axis=0)
    made: torch.Tensor = quantize_weight(weight, qtype=qtype, axis=0, scale=scale, activation_qtype=None)
    return made


_MAKERS = {NATIVE: _native, TORCHAO: _torchao, QUANTO: _quanto}


def why_not(backend: str, scheme: str, rows: bool) -> str | None:
    """Why a backend cannot make this, in words that can end a refusal; None where it can (if it is installed)."""
    if backend == QUANTO and scheme != WEIGHT_ONLY:
        return "quanto quantizes weights only here: its activations need a calibration, and without one are garbage"
    if backend == TORCHAO and scheme not in (DYNAMIC, WEIGHT_ONLY):
        return "torchao has no scheme 'storage'"
    if backend in (QUANTO, TORCHAO) and scheme != DYNAMIC and not rows:
        return f"{backend} quantizes weights per row only"
    return None
