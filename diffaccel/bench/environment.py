"""The machine and the versions that a figure belongs to."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("diffusers", "transformers", "accelerate")


def environment() -> dict[str, Any]:
    """Versions, threads, cores, device and the machine's load in the last minute (None where it is not told)."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "diffaccel": _version("diffaccel"),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "cuda": torch.version.cuda if gpu else None,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout that was not installed
        return None
