"""Decisions on machines that are not here: the same plan from every processor that this suite runs on."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from diffaccel import MissingDependencyError, plan
from diffaccel.attention import backends
from diffaccel.attention.backends import BACKENDS, SAGE, unfit
from diffaccel.attention.kernels import KERNELS
from diffaccel.compilation import toolchain
from diffaccel.core.compat import int8_units
from diffaccel.ledger.hardware import HARDWARE, KINDS, Hardware
from diffaccel.quantization.svdquant import backends as svdquant
from tests import tiny


@dataclass(frozen=True)
class Expected:
    """What is on for a bf16 model with a head_dim of 128, all packages installed."""

    hardware: Hardware
    attention: str  # names of backends
    sage: str
    sparse: str  # kernels of sparse attention
    fp8: str = "dynamic"
    int8: str = "dynamic"
    svdquant: str = "torch"  # for int4
    offload: bool = True


EVERY = "cudnn flash flex native xformers"
ADA = "1 2 hub reference triton"
GPU = "flex torch triton"
MACHINES = {
    "cpu": Expected(HARDWARE["cpu"], "flex native", "reference", "torch", offload=False),
    "cuda 8.0": Expected(HARDWARE["a100"], EVERY, ADA, GPU, fp8="weight_only", svdquant="nunchaku"),
    "cuda 8.6": Expected(HARDWARE["3060"], EVERY, ADA, GPU, fp8="weight_only", svdquant="nunchaku"),
    "cuda 8.9": Expected(HARDWARE["4090"], EVERY, ADA, GPU, svdquant="nunchaku"),
    "cuda 9.0": Expected(HARDWARE["h100"], EVERY + " flash3", ADA, GPU, svdquant="triton"),
    "cuda 10.0": Expected(HARDWARE["b200"], EVERY, "1 3 reference triton", GPU, svdquant="triton"),
    "cuda 12.0": Expected(HARDWARE["5090"], EVERY, ADA + " 3", GPU, svdquant="triton"),
    "rocm": Expected(
        Hardware("AMD Instinct MI300X", "rocm", 192.0), "native", "reference", "torch", "weight_only", "weight_only"
    ),
    "other": Expected(Hardware("npu", "other"), "native", "reference", "torch", "weight_only", "weight_only"),
    "mps": Expected(
        Hardware("Apple GPU", "mps", 48.0), "native", "reference", "torch", "", "weight_only", offload=False
    ),
    "xpu": Expected(
        Hardware("Intel Arc B580", "xpu", 12.0), "native", "reference", "torch", "weight_only", "weight_only"
    ),
}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.build("flux")


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Expected:
    """One of them, with every package and a C++ compiler there."""
    monkeypatch.setattr(backends, "absent", lambda package: None)
    monkeypatch.setattr(toolchain, "_lacks_cpp", lambda: None)
    monkeypatch.setattr(svdquant, "installed_nunchaku", lambda: svdquant.REAL)
    monkeypatch.setattr(svdquant, "hub_kernels", lambda: False)
    real = importlib.util.find_spec
    found = importlib.machinery.ModuleSpec("triton", None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: found if name == "triton" else real(name, package)
    )
    return MACHINES[request.param]


def test_kinds_are_all_here() -> None:
    assert {expected.hardware.kind for expected in MACHINES.values()} == set(KINDS)


def test_attention(machine: Expected) -> None:
    fit = {name for name, row in BACKENDS.items() if unfit(row, machine.hardware, "bfloat16", 128) is None}
    assert fit == set(machine.attention.split())
    fit = {name for name, row in SAGE.items() if unfit(row, machine.hardware, "bfloat16", 128) is None}
    assert fit == set(machine.sage.split())
    fit = {name for name, row in KERNELS.items() if row.needs(machine.hardware) is None}
    assert fit == set(machine.sparse.split())


@pytest.mark.parametrize("units", [False, True])
def test_quantization(machine: Expected, pipe: Any, units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, amx=False, vnni=units)
    fp8 = plan(pipe, None, hardware=machine.hardware, quantization="fp8").item("quantization.fp8")
    if machine.fp8:
        assert fp8.status == "enabled" and f"FP8 {machine.fp8} " in fp8.reason
        assert ("asked for dynamic" in fp8.reason) == (machine.fp8 != "dynamic")
    else:
        assert fp8.status == "refused" and "int8" in fp8.reason
    int8 = plan(pipe, None, hardware=machine.hardware, quantization="int8").item("quantization.int8")
    assert int8.status == "enabled" and f"INT8 {machine.int8} " in int8.reason
    assert ("no gain in speed" in int8.reason) == (machine.hardware.kind == "cpu" and not units)


def test_svdquant(machine: Expected) -> None:
    chosen = svdquant.choose("auto", "int4", machine.hardware, "bfloat16")
    assert not isinstance(chosen, str) and chosen.backend == machine.svdquant


def test_offload(machine: Expected, pipe: Any) -> None:
    """To the host's memory: only where the device has one of its own."""
    for value in ("stage", "layerwise"):
        item = plan(pipe, None, hardware=machine.hardware, offload=value, offload_store="host").items[0]
        assert (item.status == "enabled") == machine.offload, item.reason
        if not machine.offload:
            assert "disk" in item.reason


def test_compile(machine: Expected, pipe: Any) -> None:
    item = plan(pipe, None, hardware=machine.hardware, compile=True).items[0]
    assert (item.status == "enabled") == (machine.hardware.kind not in ("mps", "other")), item.reason
    if machine.hardware.kind in ("mps", "other"):
        assert "aot_eager" in item.reason
        other = plan(pipe, None, hardware=machine.hardware, compile=True, compile_backend="aot_eager").items[0]
        assert other.status == "enabled"


def test_auto_decides_everywhere(machine: Expected, pipe: Any) -> None:
    """The default preset: a plan without an error, and every item that is off says why."""
    decided = plan(pipe, hardware=machine.hardware)
    assert decided.hardware.startswith(machine.hardware.name)
    assert all(item.reason for item in decided.items if item.status != "enabled")


# ---- processors ----------------------------------------------------------------------------------------------------


def processor(monkeypatch: pytest.MonkeyPatch, amx: bool, vnni: bool) -> None:
    """A processor with these units (ARM has neither), in place of the one here."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)


@pytest.mark.parametrize(("amx", "vnni"), [(False, False), (False, True), (True, False), (True, True)])
def test_units_of_a_processor(amx: bool, vnni: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, amx, vnni)
    assert int8_units() is (amx or vnni)


def test_a_missing_package_is_told_apart_from_a_wrong_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the fixture: without the packages, CUDA has PyTorch's own attention and no more."""
    monkeypatch.setattr(backends, "absent", lambda package: f"{package.distribution} is not installed")
    fit = {name for name, row in BACKENDS.items() if unfit(row, HARDWARE["h100"], "bfloat16", 128) is None}
    assert fit == {"cudnn", "flex", "native"}
    half = tiny.build("flux").to(torch.bfloat16)
    with pytest.raises(MissingDependencyError):
        plan(half, None, hardware="h100", attention="flash", strict=True)
