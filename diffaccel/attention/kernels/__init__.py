"""Kernels that compute attention from a block plan or in 8 bits; each says where it cannot."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...ledger.hardware import Hardware

LEAST_TRITON = (8, 0)  # older chips have no tensor cores that Triton uses


@dataclass(frozen=True)
class Kernel:
    """One way to compute block-sparse attention from a plan: `module.block_sparse`, imported when first called."""

    name: str
    module: str
    needs: Callable[[Hardware], str | None]

    def run(self, q: Any, k: Any, v: Any, plans: Any, *, scale: float | None = None, return_lse: bool = False) -> Any:
        """Attention of q, k, v [B, H, N, D] over the kept blocks; see `torch_plan.block_sparse`."""
        module = importlib.import_module(f"{__name__}.{self.module}")
        return module.block_sparse(q, k, v, plans, scale=scale, return_lse=return_lse)


def _anywhere(hardware: Hardware) -> str | None:
    return None


def _flex(hardware: Hardware) -> str | None:
    if hardware.kind != "cuda":
        return f"the flex kernel is for CUDA: uncompiled, on {hardware.name}, it computes every score that is left out"
    return None


def _triton(hardware: Hardware) -> str | None:
    if hardware.kind != "cuda":
        return f"the Triton kernel needs a CUDA device, this is {hardware.name}"
    if hardware.capability and hardware.capability < LEAST_TRITON:
        return f"the Triton kernel needs compute capability 8.0, {hardware.name} has less"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None


KERNELS: dict[str, Kernel] = {
    k.name: k
    for k in (
        Kernel("triton", "triton_sparse", _triton),
        Kernel("torch", "torch_plan", _anywhere),
        Kernel("flex", "flex", _flex),
    )
}


def choose_kernel(name: str, hardware: Hardware) -> tuple[Kernel | None, str]:
    """(kernel, why): the named one, or for "auto" the first of the table that can run here; None where it cannot."""
    if name != "auto":
        why = KERNELS[name].needs(hardware)
        return (KERNELS[name] if why is None else None), why or "asked for"
    best = next(kernel for kernel in KERNELS.values() if kernel.needs(hardware) is None)
    return best, "the best that runs here"
