"""Tiny but really trained pipelines, their world of coloured shapes, and a scorer that reads pictures.

    pipe = testbed.load("image")
    prompts = testbed.prompts(n=4)
    images = pipe(prompts, **testbed.call_kwargs("image")).images
    testbed.score(images, prompts)["score"]

Importing this package imports neither torch nor diffusers.
"""

from __future__ import annotations

from .bundle import call_kwargs, load
from .scoring import score
from .world import prompts

__all__ = ["call_kwargs", "load", "prompts", "score"]
