"""The attention backends this version can choose, and what each can do. Pure data and one pure question."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from ..ledger.hardware import Hardware


@dataclass(frozen=True)
class Backend:
    """One row of the capability table.

    `diffusers_name` is the value of diffusers' AttentionBackendName; `dtypes` and `max_head_dim` of None mean
    any; `package` must be importable; `capability` is the lowest CUDA compute capability.
    """

    name: str
    diffusers_name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...] | None = None
    max_head_dim: int | None = None
    package: str | None = None
    capability: tuple[int, int] | None = None
    install: str = ""


BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend("flash", "flash", ("cuda",), ("float16", "bfloat16"), 256, "flash_attn", (8, 0), "flash-attn"),
        Backend("flex", "flex", ("cpu", "cuda")),
        Backend("native", "native", ("cpu", "cuda")),
    )
}

# What "auto" tries, best first.
AUTO = ("flash", "native")


def unfit(backend: Backend, hardware: Hardware, dtype: str, head_dim: int | None) -> str | None:
    """Why this backend cannot serve such attention, in a clause; None when it can."""
    if hardware.kind not in backend.devices:
        return f"{backend.name} needs {' or '.join(backend.devices)}, this is {hardware.name}"
    if backend.capability and hardware.capability and hardware.capability < backend.capability:
        need = ".".join(map(str, backend.capability))
        return f"{backend.name} needs compute capability {need}, {hardware.name} has less"
    if backend.dtypes and dtype not in backend.dtypes:
        return f"{backend.name} needs {' or '.join(backend.dtypes)}, the model is {dtype}"
    if backend.max_head_dim and head_dim and head_dim > backend.max_head_dim:
        return f"{backend.name} takes a head_dim of at most {backend.max_head_dim}, the model has {head_dim}"
    if backend.package and importlib.util.find_spec(backend.package) is None:
        return f"{backend.package} is not installed (pip install {backend.install})"
    return None
