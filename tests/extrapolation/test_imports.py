"""The mathematics of steps imports with torch alone, as a program without diffusers needs it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import diffaccel.extrapolation

MODULES = sorted(module.name for module in pkgutil.iter_modules(diffaccel.extrapolation.__path__))
ABSENT = ("diffusers", "transformers", "accelerate", "torchao", "peft")
# What a plug-in of another program takes from the caches, which need torch alone as well.
PURE = ("caching.policy", "caching.grouped", "caching.tables", "caching.gates.teacache")


@pytest.mark.parametrize("names", [tuple(f"extrapolation.{name}" for name in MODULES), PURE], ids=["room", "caches"])
def test_no_library_of_models_is_loaded(names: tuple[str, ...]) -> None:
    lines = [f"import diffaccel.{name}" for name in names]
    lines += ["import sys", f"print([name for name in {ABSENT} if name in sys.modules])"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_room_is_not_empty() -> None:
    assert {"correction", "forecast", "hermite", "ladder", "newton", "schedule"} <= set(MODULES)
