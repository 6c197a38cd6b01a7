"""The function that computes a layer, by backend."""

from __future__ import annotations

from .backends import NUNCHAKU, TORCH, TRITON, TRITON_INT8, Chosen
from .linear import Runner, run_torch


def runner(chosen: Chosen) -> Runner:
    """(layer, input) -> output of the chosen backend."""
    if chosen.backend == NUNCHAKU:
        from .nunchaku_run import run_hub, run_package

        return run_package if chosen.source == "package" else run_hub
    if chosen.backend in (TRITON, TRITON_INT8):
        from .triton_run import run_triton, run_triton_int8

        return run_triton if chosen.backend == TRITON else run_triton_int8
    assert chosen.backend == TORCH, chosen
    return run_torch
