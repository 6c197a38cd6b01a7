"""Which module decodes an autoencoder in strips."""

from __future__ import annotations

import importlib
from typing import Any

import torch

BACKENDS = ("kl", "causal")  # modules of this room, asked in this order; `models.vae` says which classes they take


def find_backend(vae: Any) -> tuple[Any, str]:
    """(the module that decodes this VAE in strips or None, why not)."""
    reasons = []
    for name in BACKENDS:
        backend = importlib.import_module(f".{name}", __package__)
        why = backend.supports(vae)
        if why is None:
            return backend, ""
        reasons.append(f"{why} ({backend.NAME})")
    return None, "; ".join(dict.fromkeys(reasons))


def itemsize_of(vae: Any) -> int:
    """Bytes per element of what the VAE computes in: its own type, or float32 where a pipeline lifts it to that."""
    dtype: torch.dtype = next(vae.parameters()).dtype
    lifted = dtype == torch.float16 and getattr(getattr(vae, "config", None), "force_upcast", False)
    return 4 if lifted else dtype.itemsize
