"""What guidance reuse answers is not booked as the cache's."""

from __future__ import annotations

from diffaccel import accelerate
from tests import tiny


def test_a_cache_counts_its_own_hits_only() -> None:
    guidance = {"guidance": "reuse", "guidance_interval": 2, "guidance_first_steps": 0, "guidance_min_steps": 0}
    cache = {"cache": "schedule", "cache_steps": [0, 1, 3, 4, 5], "cache_min_steps": 0}
    pipe = accelerate(tiny.build("wan"), None, strict=True, **guidance, **cache)
    tiny.run(pipe, "wan", num_inference_steps=6)
    report = pipe.acceleration.report
    by_guidance = report.stats["guidance.reuse"]["steps_reuse"]
    reused = sum(not step.computed for step in report.steps)
    assert by_guidance > 0 and reused > by_guidance
    assert report.stats["cache.schedule"]["hit_rate"] == round((reused - by_guidance) / len(report.steps), 4)
