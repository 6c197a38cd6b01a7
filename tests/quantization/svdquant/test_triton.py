"""The Triton kernels: against the reference in Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


def worker(*argv: str, **environment: str) -> Any:
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.quantization.svdquant.triton_worker", *argv]
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900, env=clean)
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("which", "count"), [("few", 4), pytest.param("all", 8, marks=pytest.mark.slow)])
def test_kernels_compute_the_reference_in_the_interpreter(which, count):
    found = worker("interpret", which)
    assert len(found) == count
    for case, numbers in found.items():
        assert numbers["16"] < 1e-6 and numbers["strided"] < 1e-6, (case, numbers)
        assert numbers["8"] < (0.01 if case.startswith("int4") else 1e-6), (case, numbers)
        assert numbers["8"] > 1e-4 or case.startswith("nvfp4"), (case, numbers)  # 8 bits were really used
        assert numbers["bf16"] < 0.01 and numbers["dtype"] == "torch.bfloat16", (case, numbers)
        assert numbers["empty"] == [1, 0, 70]


def check(cases: list[list[Any]], cache: Path) -> None:
    for (capability, kernel, rank), found in zip(
        cases, worker("ptx", json.dumps(cases), TRITON_CACHE_DIR=str(cache)), strict=True
    ):
        assert found["mma"] and found["target"], (capability, kernel, rank, found)
        assert 0 < found["shared"] <= SHARED_BYTES[capability], (capability, kernel, rank, found)


@pytest.mark.slow
def test_kernels_compile_for_ada(tmp_path):
    check([[89, "int4", 32]], tmp_path)


@pytest.mark.slow
def test_kernels_compile_for_every_architecture(tmp_path):
    kinds = [["int4", 32], ["nvfp4", 32], ["int8", 32], ["int4", 256]]
    check([[capability, *kind] for capability in SHARED_BYTES for kind in kinds], tmp_path)
