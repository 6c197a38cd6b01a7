"""The attention backends and what each can do. Pure data and pure questions; nothing is imported to answer them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import TYPE_CHECKING

from ..ledger.hardware import KINDS, Hardware

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Package:
    """What must be installed.

    Attributes:
        module: must be importable.
        distribution: whose metadata say that the module is the one that is meant (others may carry its name).
        at_least, below: range of versions, below exclusive.
        compiled: beginning of the name of a compiled file that the package must have brought along.
        install: what to give to pip, or how else to get it.
    """

    module: str
    distribution: str
    install: str
    at_least: tuple[int, ...] | None = None
    below: tuple[int, ...] | None = None
    compiled: str | None = None


@dataclass(frozen=True)
class Backend:
    """One row of the capability table.

    Attributes:
        name: ours.
        diffusers_name: value of diffusers' AttentionBackendName; "" where diffusers has none.
        devices: kinds of hardware (`ledger.hardware.KINDS`); of a call's tensors, torch device types.
        dtypes: None: any.
        head_dims, max_head_dim, head_dim_multiple: which head_dim it takes; None: any.
        mask: takes a mask (and obeys it).
        causal, cross, gqa: causal attention; as many keys as there are not queries; fewer heads of keys.
        key_multiple: number of keys must be a multiple of this, since keys of a short last block are not hidden
            (unless the error is below TAIL_ERROR).
        lse: can return the log-sum-exp.
        scale: takes another scale of the scores than 1/sqrt(head_dim).
        package: what must be installed.
        capability: lowest CUDA compute capability; `capabilities`: the only ones, where a list is known.
    """

    name: str
    diffusers_name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    mask: bool = False
    causal: bool = True
    cross: bool = True
    gqa: bool = True
    key_multiple: int = 1
    lse: bool = False
    scale: bool = True
    package: Package | None = None
    capability: tuple[int, int] | None = None
    capabilities: tuple[tuple[int, int], ...] | None = None


HALF = ("float16", "bfloat16")
ANY = tuple(KINDS)
ALL = ("float16", "bfloat16", "float32")
TAIL_ERROR = 1e-3  # share of unhidden keys below which a short last block is harmless

# flash: README of flash-attention. flash3: Hopper only. cudnn: PyTorch's own checks (sdp_utils). xformers: diffusers
# turns a boolean mask into one that adds 1 or 0 to the scores, which hides nothing: no masks. flex: diffusers' wrapper
# cannot return the log-sum-exp.
BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend("cudnn", "_native_cudnn", ("cuda",), HALF, max_head_dim=128, head_dim_multiple=8, mask=True,
                capability=(8, 0)),
        Backend("flash", "flash", ("cuda",), HALF, max_head_dim=256, lse=True, capability=(8, 0),
                package=Package("flash_attn", "flash_attn", "flash-attn", (2, 6, 3))),
        Backend("flash3", "_flash_3", ("cuda",), HALF, max_head_dim=256, lse=True, capability=(9, 0),
                capabilities=((9, 0),),
                package=Package("flash_attn_interface", "flash_attn_3", "flash-attn's source, folder hopper")),
        Backend("flex", "flex", ("cpu", "cuda"), mask=True),
        Backend("native", "native", ANY, mask=True),
        Backend("xformers", "xformers", ("cuda",), HALF, capability=(8, 0),
                package=Package("xformers", "xformers", "xformers", (0, 0, 29))),
    )
}  # fmt: skip

# What "auto" tries, best first.
AUTO = ("flash3", "flash", "native")

_SAGE2 = Package("sageattention", "sageattention", "sageattention 2.2.0 from its source (needs nvcc)", (2, 1, 1), None,
                 "_")  # fmt: skip

# 8-bit attention. 1: 1.x from PyPI, pure Triton. 2: built with nvcc, raises on sm_100. 3: 4 bits, Blackwell.
# hub: version 2 as a binary from the hub. triton: ours. reference: ours in plain PyTorch, for comparison.
SAGE: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend("1", "", ("cuda",), ALL, head_dims=(64, 96, 128), key_multiple=64, causal=False, capability=(8, 0),
                package=Package("sageattention", "sageattention", "sageattention==1.0.6", (1,), (2,))),
        Backend("2", "sage", ("cuda",), HALF, max_head_dim=128, lse=True, package=_SAGE2, capability=(8, 0),
                capabilities=((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))),
        Backend("3", "sage_blackwell_hub", ("cuda",), HALF, head_dims=(64, 128), causal=False, gqa=False,
                capability=(10, 0),
                package=Package("sageattn3", "sageattn3", "sageattn3 from SageAttention's source, folder "
                                "sageattention3_blackwell", compiled="fp4attn")),
        Backend("hub", "sage_hub", ("cuda",), HALF, max_head_dim=128, lse=True, capability=(8, 0),
                capabilities=((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1)),
                package=Package("kernels", "kernels", "kernels", (0, 12))),
        Backend("reference", "", ANY, ALL, causal=False, lse=True),
        Backend("triton", "", ("cuda",), ALL, max_head_dim=128, causal=False, lse=True, capability=(8, 0),
                package=Package("triton", "triton", "triton")),
    )
}  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    """The leading whole numbers of a version: "0.0.29.post1" -> (0, 0, 29)."""
    found = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _find(package: Package) -> Distribution | None:
    for name in (package.distribution, package.distribution.replace("_", "-")):
        try:
            return distribution(name)
        except PackageNotFoundError:
            continue
    return None


def absent(package: Package) -> str | None:
    """Why a package counts as not installed, in a clause; None when it is there. Imports nothing."""
    if importlib.util.find_spec(package.module) is None:
        return f"{package.distribution} is not installed (pip install {package.install})"
    there = _find(package)
    if there is None:
        return f"a module {package.module} is there, but the package {package.distribution} is not installed"
    version = _numbers(there.version)
    if package.at_least and version < package.at_least:
        need = _dotted(package.at_least)
        return f"{package.distribution} {there.version} is installed, {need} or later is needed"
    if package.below and version >= package.below:
        return f"{package.distribution} {there.version} is installed, one below {_dotted(package.below)} is needed"
    if package.compiled is not None:
        binaries = [f.name for f in there.files or () if f.suffix in (".so", ".pyd")]
        if not any(name.startswith(package.compiled) for name in binaries):
            return f"{package.distribution} {there.version} is not installed with its compiled kernels"
    return None


def unfit(backend: Backend, hardware: Hardware, dtype: str, head_dim: int | None) -> str | None:
    """Why this backend cannot serve such attention at all, in a clause; None when it can. Asked when planning."""
    name = label(backend)
    if hardware.kind not in backend.devices:
        return f"{name} needs {' or '.join(backend.devices)}, this is {hardware.name}"
    if backend.capability and hardware.capability and hardware.capability < backend.capability:
        return f"{name} needs compute capability {_dotted(backend.capability)}, {hardware.name} has less"
    if backend.capabilities and hardware.capability and hardware.capability not in backend.capabilities:
        known = ", ".join(map(_dotted, backend.capabilities))
        return f"{name} is made for compute capability {known}, {hardware.name} has {_dotted(hardware.capability)}"
    reason = _unfit_numbers(backend, dtype, head_dim)
    if reason is None and backend.package is not None:
        reason = absent(backend.package)
    return reason


@functools.cache
def label(backend: Backend) -> str:
    """How messages call it."""
    return f"sage variant {backend.name!r}" if SAGE.get(backend.name) is backend else backend.name


def _unfit_numbers(backend: Backend, dtype: str, head_dim: int | None) -> str | None:
    name = label(backend)
    if backend.dtypes and dtype not in backend.dtypes:
        return f"{name} needs {' or '.join(backend.dtypes)}, the model is {dtype}"
    if head_dim is None:
        return None
    if backend.head_dims and head_dim not in backend.head_dims:
        return f"{name} takes a head_dim of {', '.join(map(str, backend.head_dims))}, the model has {head_dim}"
    if backend.max_head_dim and head_dim > backend.max_head_dim:
        return f"{name} takes a head_dim of at most {backend.max_head_dim}, the model has {head_dim}"
    if head_dim % backend.head_dim_multiple:
        return f"{name} takes multiples of {backend.head_dim_multiple} as head_dim, the model has {head_dim}"
    return None


def unfit_call(
    backend: Backend,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: torch.dtype | str,
    device_type: str,
    mask: bool = False,
    causal: bool = False,
    gqa: bool = False,
    lse: bool = False,
    scale: float | None = None,
) -> str | None:
    """Why this backend cannot serve one call, in a clause; None when it can.

    Args:
        backend: a row of BACKENDS or SAGE.
        q_shape, k_shape: [B, Nq, H, D] and [B, Nk, Hkv, D], keys as the kernel would get them (after slicing away
            hidden ones).
        dtype: of q, k and v.
        device_type: torch's, such as "cpu" or "cuda".
        mask: whether a mask would have to go to the kernel.
        causal, gqa, lse: what the call asks for.
        scale: of the scores; None: the default.
    """
    name, head_dim = label(backend), q_shape[-1]
    if device_type not in backend.devices:
        return f"{name} needs {' or '.join(backend.devices)}, the tensors are on {device_type}"
    reason = _unfit_numbers(backend, str(dtype).removeprefix("torch."), head_dim)
    if reason is not None:
        return reason
    if mask and not backend.mask:
        return f"{name} takes no mask"
    if causal and (not backend.causal or q_shape[1] != k_shape[1]):
        return f"{name} takes no causal attention" + ("" if not backend.causal else " over more keys than queries")
    if q_shape[1] != k_shape[1] and not backend.cross:
        return f"{name} needs as many keys as queries"
    if (gqa or q_shape[2] != k_shape[2]) and not backend.gqa:
        return f"{name} needs as many heads of keys as of queries"
    if lse and not backend.lse:
        return f"{name} returns no log-sum-exp"
    if scale is not None and not backend.scale and scale != head_dim**-0.5:
        return f"{name} takes no scale of its own"
    short = -k_shape[1] % backend.key_multiple
    if short and short / k_shape[1] >= TAIL_ERROR:
        return f"{name} does not hide the tail of {k_shape[1]} keys, no multiple of {backend.key_multiple}"
    return None
