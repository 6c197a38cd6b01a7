"""The slope between a loop's first two samples is not used alone; where a loop begins late, it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate
from diffaccel.caching.step import Step
from tests import tiny

METHODS: dict[str, dict[str, Any]] = {
    "dbcache": {"cache_threshold": 1e-9, "cache_front_blocks": 1, "cache_back_blocks": 0, "cache_warmup_steps": 0},
    "schedule": {"cache_steps": [0, 1, 2, 3]},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["flux", "flux_img2img"])
def test_what_a_third_step_would_be_given(family: str, method: str) -> None:
    """By hand: v1 where the loop begins at full noise, else 2 v1 - v0; with three samples always 2 v2 - v1."""
    pipe = tiny.build(family)
    accelerate(pipe, None, strict=True, cache=method, cache_order=1, cache_min_steps=0, **METHODS[method])
    seen: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def look(pipe: Any, index: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        run = pipe.acceleration.run_in_progress()
        [branch] = run.state[f"cache.{method}"].values()
        [guess, *_] = branch.policy.forecast(branch.memory, Step(index + 1, run.total))
        seen.append(([sample.values[0] for sample in branch.memory.history], guess))
        return {}

    steps = 4 if family == "flux" else 6
    tiny.run(pipe, family, output_type="latent", num_inference_steps=steps, callback_on_step_end=look)
    (first, second), found = seen[1]
    wanted = second if family == "flux" else 2 * second - first
    assert torch.allclose(found, wanted, atol=1e-5) and not torch.allclose(second, 2 * second - first, atol=1e-3)
    (second, third), found = seen[2]
    assert torch.allclose(found, 2 * third - second, atol=1e-5)
