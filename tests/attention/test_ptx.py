"""The Triton kernels compile for every architecture of the tile table, within its shared memory; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffaccel.attention.kernels.tiles import LOWEST, SHARED_BYTES, TILES, tile

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900
TENSOR = {(8, 0): "mma.sync", (8, 6): "mma.sync", (8, 9): "mma.sync", (9, 0): "wgmma.mma_async",
          (10, 0): "tcgen05.mma", (12, 0): "mma.sync"}  # fmt: skip


def compiled(cases: list[dict[str, Any]], cache: Path) -> list[dict[str, Any]]:
    """What one process without the interpreter made of the cases."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.attention.ptx_worker", json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(cases)
    return found


def fits(found: dict[str, Any], tensor: bool = True) -> None:
    """Machine code within the limits, on the instructions the architecture is bought for."""
    capability = tuple(found["capability"])
    assert found["target"].startswith(f"sm_{capability[0]}{capability[1]}")
    assert found["cubin"] > 10_000
    assert 0 < found["shared"] <= SHARED_BYTES[capability], found
    assert found["tensor"] == ([TENSOR[capability]] if tensor else []), found


FEW = ((8, 9), (9, 0))  # every one compiles in seconds: what is common, and what differs most


@pytest.mark.parametrize(
    ("sparse", "eight_bits"), [(FEW, FEW[:1]), pytest.param(tuple(TILES), FEW, marks=pytest.mark.slow)]
)
def test_block_sparse_and_int8_in_half_precision(
    tmp_path: Path, sparse: tuple[tuple[int, int], ...], eight_bits: tuple[tuple[int, int], ...]
) -> None:
    cases = [{"kernel": "block_sparse_kernel", "capability": c, "dtype": "bfloat16", "head_dim": 128} for c in sparse]
    eight = {"kernel": "int8_kernel", "dtype": "bfloat16", "head_dim": 128}
    cases += [eight | {"capability": c, "ones": ["group", "heads", "k_blocks"] * (c == (9, 0))} for c in eight_bits]
    cases[0] |= {"ones": ["group"]}
    # The negative control: the tile of an H100 in float32 does not go into a 4090.
    large = {
        "kernel": "block_sparse_kernel",
        "capability": (8, 9),
        "dtype": "float32",
        "head_dim": 128,
        "precision": "tf32",
    }
    *good, bad = compiled([*cases, large | {"tile": (128, 64, 8, 3), "order": False}], tmp_path)
    for found in good:
        fits(found)
        assert found["int8"] == (found["kernel"] == "int8_kernel")
    assert bad["shared"] > SHARED_BYTES[(8, 9)]


@pytest.mark.slow
@pytest.mark.parametrize("capability", sorted(TILES))
def test_all_types_and_sizes(tmp_path: Path, capability: tuple[int, int]) -> None:
    base = {"kernel": "block_sparse_kernel", "capability": capability}
    cases = [base | {"dtype": dtype, "head_dim": dim, "order": order}
             for dtype in ("bfloat16", "float16") for dim in (64, 96, 128) for order in (False, True)]  # fmt: skip
    cases += [base | {"dtype": "float32", "head_dim": dim, "precision": "tf32"} for dim in (64, 96, 128)]
    cases += [base | {"kernel": "int8_kernel", "dtype": dtype, "head_dim": 128} for dtype in ("bfloat16", "float32")]
    for found in compiled(cases, tmp_path):
        fits(found)
    exact = base | {"dtype": "float32", "head_dim": 128, "precision": "ieee"}
    for found in compiled([exact], tmp_path):
        fits(found, tensor=False)  # exact products of float32 are not for tensor cores


def test_architectures_between_and_beyond() -> None:
    assert tile("two_bytes", (8, 7)) == tile("two_bytes", (8, 6))
    assert tile("int8", (12, 1)) == tile("int8", (12, 0)) and tile("two_bytes", (11, 0)) == tile("two_bytes", (10, 0))
    assert set(TILES) == set(SHARED_BYTES) and min(TILES) == LOWEST
