"""A cache goes on through calls of half a batch: what the whole batch taught holds for its half."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate
from tests import tiny
from tests.invariants.levers import trace

CACHES: dict[str, dict[str, Any]] = {
    "easycache": {"cache_threshold": 9.0, "cache_warmup_steps": 0},
    "first_block": {"cache_threshold": 0.9},
    "interval": {"cache_interval": 2},
    "schedule": {"cache_steps": [0, 2, 4, 6, 8], "cache_order": 1},
}


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_half_calls_reuse_what_whole_ones_computed(cache: str) -> None:
    options = {"cache": cache, "cache_min_steps": 0, "cache_last_steps": 0, **CACHES[cache]}
    guidance = {"guidance": "reuse", "guidance_interval": 2, "guidance_first_steps": 0, "guidance_min_steps": 0}
    pipe = accelerate(tiny.build("sd3"), None, strict=True, **options, **guidance)
    output = tiny.run(pipe, "sd3", num_inference_steps=9)
    calls = trace(pipe)
    assert {branch for _, branch, _ in calls} == {"cond_uncond", "cond"}
    reused = [branch for _, branch, computed in calls if not computed]
    assert "cond" in reused, calls
    # Every whole batch that follows a half one is computed: its other half was absent.
    assert all(computed for _, branch, computed in calls[1:] if branch == "cond_uncond")
    assert torch.isfinite(output).all() and pipe.acceleration.report.cache_bytes_held == 0
    assert torch.equal(tiny.run(pipe, "sd3", num_inference_steps=9), output), "nothing is left over"


def test_the_half_is_that_of_the_conditional_branch() -> None:
    """Reusing the output of step 0 for the half call of step 1 must answer with step 0's conditional output."""
    options = {"cache": "schedule", "cache_steps": "10", "cache_order": 0, "cache_min_steps": 0}
    guidance = {"guidance": "reuse", "guidance_interval": 2, "guidance_first_steps": 0, "guidance_min_steps": 0}
    pipe = tiny.build("sd3")
    seen: list[torch.Tensor] = []
    handle = pipe.transformer.register_forward_hook(lambda module, args, output: seen.append(output[0].clone()))
    accelerate(pipe, None, strict=True, **options, **guidance, guidance_last_steps=0)
    tiny.run(pipe, "sd3", num_inference_steps=2)
    handle.remove()
    whole, answer = seen
    assert len(answer) in (len(whole), len(whole) // 2)
    assert torch.equal(answer[-(len(whole) // 2) :], whole[len(whole) // 2 :])
    assert not torch.equal(answer[-(len(whole) // 2) :], whole[: len(whole) // 2]), "not the unconditional one"
