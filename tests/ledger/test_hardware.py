"""What is here: CUDA, ROCm, MPS and XPU are told apart, with a torch that claims to have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffaccel import InvalidOptionError
from diffaccel.ledger.hardware import HARDWARE, KINDS, Hardware, detect, named

GIB = 1024**3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch with one GPU; `hip` is the version of ROCm that it was built for, or None."""

    def put(name: str, gib: float, capability: tuple[int, int], hip: str | None) -> None:
        found = SimpleNamespace(name=name, total_memory=int(gib * GIB), major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)

    return put


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_cuda_device(fake: Any, capability: tuple[int, int]) -> None:
    fake("NVIDIA Something", 24, capability, None)
    assert detect("cuda") == Hardware("NVIDIA Something", "cuda", 24.0, capability)


@pytest.mark.parametrize("version", [(9, 4), (11, 0), (12, 0)])  # gfx942, gfx1100, gfx1200: not compute capabilities
def test_an_amd_gpu_is_no_cuda_device_of_that_capability(fake: Any, version: tuple[int, int]) -> None:
    fake("AMD Instinct MI300X", 192, version, "6.4.43482")
    found = detect("cuda")
    assert found == Hardware("AMD Instinct MI300X", "rocm", 192.0)
    assert found.capability is None and found.may.device == "cuda"


def test_an_intel_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Intel Arc B580", total_memory=12 * GIB)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)
    assert detect("xpu") == Hardware("Intel Arc B580", "xpu", 12.0)


def test_an_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 48 * GIB)
    assert detect("mps") == Hardware("Apple GPU", "mps", 48.0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_cpu(device: str) -> None:
    assert detect(device) is HARDWARE["cpu"]


def test_only_known_kinds() -> None:
    with pytest.raises(InvalidOptionError, match="did you mean 'cuda'"):
        Hardware("x", "cudaa")
    assert {hardware.kind for hardware in HARDWARE.values()} <= set(KINDS)


def test_cards_are_found_by_what_people_call_them() -> None:
    assert named("NVIDIA GeForce RTX 4090") == named("rtx4090") == HARDWARE["4090"]
    assert all((hardware.capability is None) == (hardware.kind != "cuda") for hardware in HARDWARE.values())
