"""The environment: kernels judged for faked machines, packages by their files, the driver by the kernel's word."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from diffaccel import doctor
from diffaccel.cli import main
from diffaccel.doctor import checkup, installation
from diffaccel.quantization.svdquant import backends as svdquant

NVIDIA = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12\n"


def states(hardware: str) -> dict[str, str]:
    return {kernel.name: kernel.state for kernel in doctor.environment(hardware).kernels}


def test_kernels_are_judged_by_the_generation_of_the_gpu() -> None:
    h100, ampere, cpu = states("h100"), states("3060"), states("cpu")
    assert h100["attention flash3"] == "not installed" and ampere["attention flash3"] == "not for this machine"
    assert h100["nunchaku int4"] == "not for this machine"  # no 4-bit units on Hopper
    assert ampere["nunchaku int4"] == "not installed"
    assert h100["fp8 products"] == "ready" and ampere["fp8 products"] == "not for this machine"
    assert cpu["attention native"] == "ready" and cpu["attention flash"] == "not for this machine"


def test_the_wrong_nunchaku_is_told_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["nunchaku/__init__.py", "nunchaku/algorithms/segment.py"]
    monkeypatch.setattr(svdquant.importlib.metadata, "distribution", lambda name: SimpleNamespace(files=files))
    assert [fault for fault, _ in installation._nunchaku()] == ["other-nunchaku"]
    assert "nunchaku" not in sys.modules
    files[:] = ["nunchaku/_C.abi3.so", "nunchaku/models/linear.py"]
    assert list(installation._nunchaku()) == []


def test_a_driver_without_a_build_for_it_and_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.driver_version(NVIDIA) == "550.54.15" and installation.driver_version("") == ""
    monkeypatch.setattr(installation.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(installation.torch.version, "hip", None, raising=False)
    for built, words in (("12.8", "finds no GPU"), (None, "without CUDA")):
        monkeypatch.setattr(installation.torch.version, "cuda", built)
        ((fault, evidence),) = installation._driver("550.54.15")
        assert fault == "driver" and words in evidence
        assert list(installation._driver("")) == []  # a machine without a GPU is no fault


def test_free_memory_is_what_linux_says() -> None:
    assert checkup.host_free_bytes("MemTotal: 9 kB\nMemAvailable:    2048 kB\n") == 2048 * 1024
    assert checkup.host_free_bytes("") == float("inf")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--hardware", "4090"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] and found["environment"]["machine"].startswith("4090")
    words = ["doctor", "--pipeline", "testbed:image", "--steps", "2", "--levers", "attention.native"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "0 faults found" in printed and "attention.native" in printed
    assert main([*words[:-1], "none", "--memory-gib", "0.001"]) == 1
    assert "wrong-machine" in capsys.readouterr().out
    assert main(["doctor", "--hardware", "4091"]) == 1


def test_the_page_has_the_table_of_the_code() -> None:
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[2] / "docs" / "make_doctor.py"
    spec = importlib.util.spec_from_file_location("make_doctor", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/make_doctor.py"
