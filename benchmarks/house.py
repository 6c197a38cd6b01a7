"""What a lever costs around it, counted: modules of ours that one cache loads, calls of ours in one verb, functions.

    python benchmarks/house.py [--out results/house.json]

`modules` are those of diffaccel in `sys.modules` after `accelerate(pipe, None, cache="first_block")`, in a process of
its own. `verb_calls` are Python calls of functions of this package made by
`pipe.enable_first_block_cache(threshold=...)` where a cache, 8-bit attention (reference) and layerwise offload to disk
are on. `functions` are lines per function of the package, training scripts apart.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "diffaccel"
LOADED = """
import sys
import diffaccel
from diffaccel import accelerate, testbed
pipe = testbed.load("image", random=True)
before = {name for name in sys.modules if name.startswith("diffaccel.testbed")}
accelerate(pipe, None, cache="first_block")
ours = {name for name in sys.modules if name.split(".")[0] == "diffaccel"} - before
print(len(ours), sum(name.split(".")[1:2] in (["quantization"], ["offload"], ["vae"], ["memory"]) for name in ours))
"""


def loaded() -> dict[str, int]:
    """Modules of ours that a user of one cache loads, and those of rooms that have nothing to do with it."""
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    count, strangers = map(int, done.stdout.split())
    return {"modules": count, "of_quantization_offload_vae": strangers}


def verb_calls() -> int:
    """Calls of ours in one change of a threshold."""
    from diffaccel import accelerate, restore, testbed

    pipe = testbed.load("image", random=True)
    others = {"attention": "sage", "attention_variant": "reference", "offload": "layerwise", "offload_store": "disk"}
    accelerate(pipe, None, cache="first_block", cache_threshold=0.1, **others)
    pipe.enable_first_block_cache(threshold=0.2)  # what happens only once
    calls = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE))

    sys.setprofile(profile)
    try:
        pipe.enable_first_block_cache(threshold=0.3)
    finally:
        sys.setprofile(None)
    restore(pipe)
    return calls


def functions() -> dict[str, float]:
    """Lines per function."""
    lengths = [
        (node.end_lineno or 0) - node.lineno + 1
        for file in PACKAGE.rglob("*.py")
        if not (file.parent.name == "testbed" and file.name.startswith(("train", "task")))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return {"median": median(lengths), "percentile_95": quantiles(lengths, n=20)[-1], "longest": max(lengths)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "house.json")
    result = {"loaded": loaded(), "verb_calls": verb_calls(), "functions": functions()}
    print(json.dumps(result, indent=1))
    parser.parse_args().out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
