"""The machine and what is installed on it: versions, what each kernel needs and whether it is there, the driver.

Packages are told by their metadata and files; nothing is imported to find out, since importing is what breaks.
"""

from __future__ import annotations

import html
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..attention.backends import BACKENDS, SAGE, unfit
from ..compilation.toolchain import lacks
from ..core.compat import drift
from ..ledger.hardware import Hardware, detect, named
from ..quantization.backends import INSTALL, PACKAGES, installed
from ..quantization.svdquant import backends as svdquant

PACKAGES_SHOWN = (
    "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "triton", "flash-attn", "flash_attn_3",
    "sageattention", "xformers", "torchao", "optimum-quanto", "nunchaku", "kernels",
)  # fmt: skip
DRIVER = Path("/proc/driver/nvidia/version")
FP8_CAPABILITY = (8, 9)  # lowest CUDA compute capability with such units
READY, ABSENT, UNFIT = "ready", "not installed", "not for this machine"


@dataclass(frozen=True)
class Kernel:
    """Something optional: for what, whether it can be used here, and why not."""

    name: str
    state: str
    why: str = ""


@dataclass(frozen=True)
class Environment:
    """Versions by package (None: not there), machine, driver and kernels; `problems` are (fault, evidence)."""

    python: str
    versions: dict[str, str | None]
    machine: str
    driver: str
    kernels: tuple[Kernel, ...]
    problems: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        here = ", ".join(f"{name} {found}" for name, found in self.versions.items() if found)
        lines = [f"python {self.python}, {here}", f"machine: {self.machine}; driver: {self.driver}"]
        width = max(len(kernel.name) for kernel in self.kernels)
        lines += [f"  {k.name:<{width}}  {k.state}" + f"{': ' * bool(k.why)}{k.why}" for k in self.kernels]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def installed_version(package: str) -> str | None:
    """The version of a package by its metadata; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version(text: str | None = None) -> str:
    """The version of NVIDIA's kernel module as Linux shows it (`text`: that file's), "" where there is none."""
    if text is None:
        text = DRIVER.read_text() if DRIVER.is_file() else ""
    found = re.search(r"Kernel Module\D*([\d.]+)", text)
    return found.group(1) if found else ""


def environment(hardware: str | Hardware | None = None) -> Environment:
    """What is here. `hardware`: judge the kernels for that machine ("h100") instead of this one."""
    machine = named(hardware) if isinstance(hardware, str) else hardware or _here()
    driver = driver_version()
    with torch.random.fork_rng(devices=[]):  # it makes a layer
        missing = drift()
    problems = [*_nunchaku(), *_driver(driver), *(("versions", f"there is no {name}") for name in missing)]
    return Environment(
        python=platform.python_version(),
        versions={name: installed_version(name) for name in PACKAGES_SHOWN},
        machine=_said(machine),
        driver=driver or "none seen",
        kernels=tuple(_kernels(machine)),
        problems=tuple(problems),
    )


def _here() -> Hardware:
    for kind, there in (("cuda", torch.cuda.is_available), ("xpu", torch.xpu.is_available)):
        if there():
            return detect(kind)
    return detect("mps" if torch.backends.mps.is_available() else "cpu")


def _said(machine: Hardware) -> str:
    capability = "" if machine.capability is None else f", compute capability {'.'.join(map(str, machine.capability))}"
    return f"{machine}{capability}"


def _nunchaku(identify: Callable[[], str] = svdquant.installed_nunchaku) -> Iterator[tuple[str, str]]:
    if identify() == svdquant.OTHER:
        yield "other-nunchaku", svdquant.CLASH


def _driver(driver: str) -> Iterator[tuple[str, str]]:
    """A PyTorch and a driver that do not go together."""
    built = torch.version.cuda
    if built is not None and driver and not torch.cuda.is_available():
        yield "driver", f"PyTorch is built for CUDA {built} and finds no GPU, though the driver {driver} is loaded"
    if built is None and torch.version.hip is None and driver:
        yield "driver", f"the driver {driver} is loaded, but this PyTorch is a build without CUDA"


def _kernels(machine: Hardware) -> Iterator[Kernel]:
    """Every optional kernel or package, as this machine stands to it."""
    dtype = "bfloat16"
    for name, backend in sorted(BACKENDS.items()):
        yield _judged(f"attention {name}", unfit(backend, machine, dtype, None))
    for name, backend in sorted(SAGE.items()):
        yield _judged(f"8-bit attention {name}", unfit(backend, machine, dtype, None))
    for precision in ("int4", "nvfp4"):
        chosen = svdquant.choose(svdquant.NUNCHAKU, precision, machine, dtype)
        yield _judged(f"nunchaku {precision}", chosen if isinstance(chosen, str) else None)
    for name in sorted(PACKAGES):
        yield _judged(f"quantization {name}", None if installed(name) else f"not installed ({INSTALL[name]})")
    yield _judged("torch.compile inductor", lacks("inductor", machine))
    yield _judged("fp8 products", _no_fp8(machine))


def _no_fp8(machine: Hardware) -> str | None:
    """Why products of 8-bit floating-point factors are not computed as such."""
    if machine.kind == "cuda" and (machine.capability or (0, 0)) < FP8_CAPABILITY:
        return f"needs compute capability 8.9, {machine.name} has less: fp8 saves memory alone there"
    return None if machine.may.fp8 == "dynamic" else "fp8 saves memory alone there" if machine.may.fp8 else "no dtype"


def _judged(name: str, why: str | None) -> Kernel:
    if why is None:
        return Kernel(name, READY)
    return Kernel(name, ABSENT if "not installed" in why or "is needed" in why else UNFIT, why)
