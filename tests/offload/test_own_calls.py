"""What the machinery costs, counted: Python calls of the package's own functions in one pipeline call."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import diffaccel
from diffaccel import accelerate, restore, testbed

PACKAGE = str(Path(diffaccel.__file__).parent) + "/"
LEVERS = {
    "cache": "first_block",
    "attention": "sage",
    "attention_variant": "reference",
    "offload": "layerwise",
    "offload_store": "disk",
}


def own_calls(pipe: Any) -> Counter[str]:
    """Calls per room in one run of ten steps; generator steps and comprehensions count as Python counts them."""
    prompts, found = testbed.prompts("test", 1), Counter[str]()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[frame.f_code.co_filename.removeprefix(PACKAGE).split("/")[0]] += 1

    generator = torch.Generator().manual_seed(0)
    sys.setprofile(seen)
    try:
        pipe(prompts, num_inference_steps=10, generator=generator, **testbed.call_kwargs("image"))
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(("threshold", "hits", "allowed"), [(0.2, 4, 3500), (1e-9, 0, 4300)])
def test_calls_of_ours_in_one_run(threshold: float, hits: int, allowed: int, tmp_path: Path) -> None:
    """Cache, 8-bit attention and disk offload together, on the image testbed; 8148 and 11692 calls once."""
    pipe = testbed.load("image")
    pipe.set_progress_bar_config(disable=True)
    accelerate(pipe, None, strict=True, cache_threshold=threshold, offload_folder=str(tmp_path), **LEVERS)
    own_calls(pipe)  # what happens only once per pipeline
    found = own_calls(pipe)
    assert sum(not step.computed for step in pipe.acceleration.report.steps) == hits
    assert found.total() <= allowed, found
    assert found["offload"] <= 1500, found
    restore(pipe)
