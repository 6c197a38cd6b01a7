"""Who computes an `SvdQuantLinear` on a machine: nunchaku's kernels, our Triton kernels, or plain PyTorch.

The package `nunchaku` on PyPI is something else (segmentation of time series) under the same name. Packages are
told apart by the files they installed; nothing is imported to find out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import InvalidOptionError, nearest
from ...ledger.hardware import Hardware

AUTO, TORCH, TRITON, TRITON_INT8, NUNCHAKU = "auto", "torch", "triton", "triton_int8", "nunchaku"
BACKENDS = (AUTO, TORCH, TRITON, TRITON_INT8, NUNCHAKU)

REAL, OTHER, ABSENT = "real", "other", "absent"
HUB_REPO = "rootonchair/nunchaku-lite-kernels"
TRUST = "DIFFUSERS_TRUST_REMOTE_KERNELS"  # the switch diffusers has for code from the hub
CLASH = (
    "the installed package nunchaku is another project of this name on PyPI (time-series segmentation): uninstall it "
    "and install a wheel from https://github.com/nunchaku-ai/nunchaku/releases"
)

# Compute capabilities with kernels. Hopper (9.0) has no 4-bit matrix units, and nunchaku no kernels for it.
CAPABLE = {
    "package": {"int4": ((7, 5), (8, 0), (8, 6), (8, 9)), "nvfp4": ((12, 0), (12, 1))},
    "hub": {
        "int4": ((7, 5), (8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0), (12, 1)),
        "nvfp4": ((10, 0), (10, 3), (12, 0), (12, 1)),
    },
}


@dataclass(frozen=True)
class Chosen:
    """A backend, where its kernels come from ("package" or "hub" for nunchaku's), and a sentence about it."""

    backend: str
    source: str
    reason: str


def identify(files: list[str]) -> str:
    """Which nunchaku is it, by the paths of its files: REAL, OTHER or ABSENT."""
    names = [Path(file).as_posix() for file in files]
    compiled = any(Path(n).name.startswith("_C") and Path(n).suffix in (".so", ".pyd") for n in names)
    if compiled and any(n.endswith("models/linear.py") for n in names):
        return REAL
    return OTHER if names else ABSENT


def installed_nunchaku() -> str:
    """Which nunchaku is installed; nothing is imported."""
    try:
        listed = importlib.metadata.distribution("nunchaku").files
    except importlib.metadata.PackageNotFoundError:
        listed = None
    if listed:
        return identify([str(file) for file in listed])
    found = importlib.util.find_spec("nunchaku")  # a source tree on the path
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return identify([str(file) for folder in folders for file in Path(folder).rglob("*.*")])


def hub_kernels() -> bool:
    """May kernels of the hub be used: is the package there, and has the user said yes to code from the hub?"""
    yes = os.environ.get(TRUST, "").lower() in ("1", "true", "yes", "on")
    return yes and importlib.util.find_spec("kernels") is not None


def choose(wanted: str, precision: str, hardware: Hardware, dtype: str = "bfloat16") -> Chosen | str:
    """The backend for a machine and a model of this dtype, or why the wanted one cannot be."""
    if wanted not in BACKENDS:
        raise InvalidOptionError(f"backend={wanted!r}: {nearest(wanted, BACKENDS)}")
    if wanted == TORCH:
        return Chosen(TORCH, "", "computed by torch on dequantized weights: saves memory, not time")
    source, why_not = _nunchaku(precision, hardware, dtype)
    if wanted == NUNCHAKU:
        return Chosen(NUNCHAKU, source, f"nunchaku's kernels ({source})") if source else why_not
    if wanted == AUTO and source:
        return Chosen(NUNCHAKU, source, f"nunchaku's kernels ({source})")
    no_triton = _no_triton(hardware)
    if wanted in (TRITON, TRITON_INT8):
        if no_triton:
            return no_triton
        if wanted == TRITON_INT8 and precision != "int4":
            return "backend='triton_int8' is for precision='int4'"
        return Chosen(wanted, "", _says_triton(wanted))
    if not no_triton:
        return Chosen(TRITON, "", f"{_says_triton(TRITON)}; {why_not}")
    return Chosen(TORCH, "", f"computed by torch on dequantized weights: saves memory, not time; {why_not}")


def _says_triton(backend: str) -> str:
    kept = "8" if backend == TRITON_INT8 else "16"
    return f"Triton kernels, weights in 4 bits and activations in {kept}: saves memory more than time"


def _no_triton(hardware: Hardware) -> str:
    if hardware.kind != "cuda":
        return f"backend='triton' needs a GPU, and this is {hardware}"
    if (hardware.capability or (0, 0)) < (8, 0):
        return f"backend='triton' needs compute capability 8.0 or later, and this is {hardware}"
    if importlib.util.find_spec("triton") is None:
        return "backend='triton' needs triton: pip install triton"
    return ""


def _nunchaku(precision: str, hardware: Hardware, dtype: str) -> tuple[str, str]:
    """(source of kernels that fit, or "") and why there are none."""
    if hardware.kind != "cuda":
        return "", f"nunchaku's kernels need an NVIDIA GPU, and this is {hardware}"
    capability = hardware.capability or (0, 0)
    if capability[0] == 9:
        return "", (
            f"nunchaku has no kernels for Hopper ({hardware} has no 4-bit matrix units): enable_fp8() is fast there"
        )
    halves = ("float16",) if capability < (8, 0) else ("float16", "bfloat16")
    bad = f"nunchaku's kernels compute in {' or '.join(halves)} on {hardware}, and the model is {dtype}"
    bad = "" if dtype in halves else bad
    which = installed_nunchaku()
    fits = {source: capability in table[precision] for source, table in CAPABLE.items()}
    package, hub = which == REAL and fits["package"], fits["hub"] and hub_kernels()
    if package or hub:
        return ("", bad) if bad else ("package" if package else "hub", "")
    if which == OTHER and fits["package"]:
        return "", CLASH
    if not fits["package"]:
        other = "nvfp4" if precision == "int4" else "int4"
        hint = (
            f"; its wheels have {other} ones: precision={other!r}" if capability in CAPABLE["package"][other] else ""
        )
        maybe = f"; those of the hub would fit (pip install kernels, {TRUST}=true)" if fits["hub"] else ""
        return "", f"nunchaku's wheels have no {precision} kernels for {hardware} ({capability}){hint}{maybe}"
    return "", bad or (
        "nunchaku is not installed (wheels: https://github.com/nunchaku-ai/nunchaku/releases; not the PyPI package of "
        f"this name), nor are kernels from the hub allowed (pip install kernels, {TRUST}=true)"
    )
