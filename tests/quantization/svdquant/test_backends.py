"""Which backend a machine gets and what is said; packages told apart by their files, never imported."""

from __future__ import annotations

import sys

import pytest

from diffaccel.errors import InvalidOptionError
from diffaccel.ledger.hardware import HARDWARE, Hardware
from diffaccel.quantization.svdquant import backends
from diffaccel.quantization.svdquant.backends import ABSENT, OTHER, REAL, choose, identify, installed_nunchaku

REAL_FILES = ["nunchaku/__init__.py", "nunchaku/_C.cpython-311-x86_64-linux-gnu.so", "nunchaku/models/linear.py"]
OTHER_FILES = ["nunchaku/__init__.py", "nunchaku/gibbs_sampler.py", "nunchaku/_models.py"]


def test_packages_of_one_name_are_told_apart():
    assert identify(REAL_FILES) == REAL
    assert identify([f.replace(".so", ".pyd") for f in REAL_FILES]) == REAL
    assert identify(OTHER_FILES) == OTHER and identify([]) == ABSENT
    assert identify(["nunchaku/models/linear.py"]) == OTHER  # without its extension it computes nothing


@pytest.mark.parametrize(("files", "wanted"), [(REAL_FILES, REAL), (OTHER_FILES, OTHER)])
def test_an_installed_package_is_not_imported(files, wanted, tmp_path, monkeypatch):
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_nunchaku() == wanted and "nunchaku" not in sys.modules


def test_nothing_installed_here():
    assert installed_nunchaku() == ABSENT


def test_a_cpu_gets_torch():
    chosen = choose("auto", "int4", HARDWARE["cpu"])
    assert chosen.backend == "torch" and "memory, not time" in chosen.reason
    assert "needs a GPU" in choose("triton", "int4", HARDWARE["cpu"])
    assert "NVIDIA GPU" in choose("nunchaku", "int4", HARDWARE["cpu"])


def test_hopper_has_no_kernels_of_nunchaku_and_is_offered_fp8(monkeypatch):
    monkeypatch.setattr(backends, "installed_nunchaku", lambda: REAL)
    for name in ("h100", "h200"):
        chosen = choose("auto", "int4", HARDWARE[name])
        assert chosen.backend == "triton" and "Hopper" in chosen.reason and "fp8" in chosen.reason
        assert "Hopper" in choose("nunchaku", "nvfp4", HARDWARE[name])


@pytest.mark.parametrize(
    ("hardware", "precision", "wanted"),
    [("4090", "int4", True), ("3060", "int4", True), ("a100", "int4", True), ("5090", "nvfp4", True),
     ("5090", "int4", False), ("4090", "nvfp4", False), ("b200", "nvfp4", False)],
)  # fmt: skip
def test_the_package_where_it_has_kernels(hardware, precision, wanted, monkeypatch):
    monkeypatch.setattr(backends, "installed_nunchaku", lambda: REAL)
    chosen = choose("auto", precision, HARDWARE[hardware])
    assert (chosen.backend, chosen.source) == (("nunchaku", "package") if wanted else ("triton", ""))


def test_kernels_of_the_hub_only_when_allowed(monkeypatch):
    monkeypatch.setattr(backends, "hub_kernels", lambda: True)
    assert choose("auto", "nvfp4", HARDWARE["b200"]).source == "hub"
    monkeypatch.setattr(backends, "hub_kernels", lambda: False)
    assert choose("auto", "nvfp4", HARDWARE["b200"]).backend == "triton"


def test_the_clash_of_names_is_said(monkeypatch):
    monkeypatch.setattr(backends, "installed_nunchaku", lambda: OTHER)
    assert "another project" in choose("nunchaku", "int4", HARDWARE["4090"])
    assert "another project" in choose("auto", "int4", HARDWARE["4090"]).reason


def test_turing_without_nunchaku_gets_torch():
    turing = Hardware("t4", "cuda", 16, (7, 5))
    assert choose("auto", "int4", turing).backend == "torch"
    assert "float16 on t4" in choose("nunchaku", "int4", turing)  # no bfloat16 before Ampere
    assert "is float32" in choose("nunchaku", "int4", HARDWARE["4090"], "float32")
    assert "8.0" in choose("triton", "int4", turing)


def test_wrong_names():
    with pytest.raises(InvalidOptionError, match="triton"):
        choose("tritn", "int4", HARDWARE["cpu"])
    assert "int4" in choose("triton_int8", "nvfp4", HARDWARE["4090"])
