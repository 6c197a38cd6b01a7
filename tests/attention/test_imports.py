"""The masks of sparse attention are for other programs too: importing them needs torch and nothing else."""

from __future__ import annotations

import subprocess
import sys

MASKS = (
    "geometry",
    "plan",
    "sparse.registry",
    *(f"sparse.{name}" for name in ("radial", "sta", "svg", "svg2", "topk")),
)
FOREIGN = ("diffusers", "transformers", "accelerate", "torchao", "peft", "triton")

SCRIPT = """
import importlib, sys
import torch
before = set(sys.modules)
for name in sys.argv[1].split():
    importlib.import_module(name)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
print(*sorted(name for name in sys.modules if name.startswith("diffaccel.")))
"""


def loaded(*modules: str) -> tuple[set[str], set[str]]:
    """(packages that importing these brings beside torch's, modules of diffaccel that it loads)."""
    command = [sys.executable, "-c", SCRIPT, " ".join(modules)]
    packages, ours = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return set(packages.split()), set(ours.split())


def test_the_masks_import_with_torch_alone() -> None:
    packages, ours = loaded(*(f"diffaccel.attention.{name}" for name in MASKS))
    assert not packages & set(FOREIGN)
    rooms = {name.split(".")[1] for name in ours}
    assert rooms == {"attention", "core", "errors", "ledger"}  # of the ledger, which floats a machine has
    assert {name for name in ours if ".core." in name} == {"diffaccel.core.options"}, "of core, the checks of options"


def test_the_lever_beside_them_does_not() -> None:
    """The negative control: what hooks into a pipeline loads diffusers, and this test sees it."""
    packages, _ = loaded("diffaccel.attention.sparse.config")
    assert "diffusers" in packages


def test_attention_imports_nothing_from_above() -> None:
    _, ours = loaded(
        "diffaccel.attention.sparse.config", "diffaccel.attention.sage.config", "diffaccel.attention.choice"
    )
    above = ("planner", "handle", "pipeline", "api", "caching", "guidance", "quantization", "offload", "vae", "cli")
    assert not {name.split(".")[1] for name in ours} & set(above)
