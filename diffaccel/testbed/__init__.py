"""Tiny but really trained pipelines, their world of coloured shapes, and a scorer that reads pictures and clips.

    pipe = testbed.load("image")
    prompts = testbed.prompts(n=4)
    images = pipe(prompts, **testbed.call_kwargs("image")).images
    testbed.score(images, prompts)["score"]

"video" in place of "image" is a WanPipeline, "scenes" a StableDiffusion3Pipeline with several things per picture;
their prompts are `prompts(kind="video")` and `prompts(kind="scenes")`. `with_shift(pipe, 1.0)` changes noise levels.
Importing this package imports neither torch nor diffusers.
"""

from __future__ import annotations

from .bundle import call_kwargs, load
from .prompting import prompts
from .scoring import score
from .shifts import with_shift

__all__ = ["call_kwargs", "load", "prompts", "score", "with_shift"]
