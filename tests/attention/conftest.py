"""What the Triton kernels computed in the interpreter: one process for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600  # some 15 seconds of CPU


@pytest.fixture(scope="session")
def interpreted() -> dict[str, Any]:
    """Case of `triton_worker` -> its numbers."""
    pytest.importorskip("triton")
    pytest.importorskip("sageattention")
    command = [sys.executable, "-W", "ignore", "-m", "tests.attention.triton_worker"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, env=dict(os.environ)
    )
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
