"""Is there what a torch.compile backend needs on this machine? Questions only, nothing is compiled or imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from ..ledger.hardware import Hardware

TRITON_CAPABILITY = (7, 0)  # lowest CUDA compute capability that Triton generates code for


def lacks(backend: str, hardware: Hardware) -> str | None:
    """What is missing for `backend` on `hardware`, in a clause; None when nothing is.

    Only "inductor" needs tools: on a CPU a C++ compiler and Python's headers, on CUDA Triton. A plan for CUDA made
    with a CPU-only PyTorch is a plan for another machine, whose packages are not judged here.
    """
    if backend != "inductor":
        return None
    if not hardware.may.inductor:
        return f"inductor is not used on {hardware.name}: give compile_backend='aot_eager', or leave compile off"
    if hardware.may.inductor == "cpp":
        return _lacks_cpp()
    if hardware.capability and hardware.capability < TRITON_CAPABILITY:
        return f"inductor needs compute capability 7.0, {hardware.name} has {'.'.join(map(str, hardware.capability))}"
    has_gpu_build = any(getattr(torch.version, name, None) is not None for name in ("cuda", "hip", "xpu"))
    if has_gpu_build and importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    return None


def compiler_name() -> str:
    """The C++ compiler that inductor calls here: $CXX, else the platform's own."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return os.environ.get("CXX") or usual


def _lacks_cpp() -> str | None:
    name = compiler_name()
    if shutil.which(name.split()[0]) is None:
        return f"inductor needs a C++ compiler on a CPU, and {name!r} was not found (install one, or set CXX)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"inductor needs Python's headers on a CPU, and {header} does not exist (install python3-dev)"
    return None
