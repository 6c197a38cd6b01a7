"""How much of what a prompt asks for is in its picture or clip; what is seen there is read by `scoring_image` and
`scoring_video`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import scoring_image, scoring_video, world


def score(images: Any, prompts: Sequence[str]) -> dict[str, float]:
    """Share of attributes that each picture or clip shows as its prompt states them, overall and per attribute.

    `images`: list of PIL images, numpy [B, H, W, 3] (uint8, or float in 0..1) or torch [B, 3, H, W] in 0..1.
    Videos: lists of frames, numpy [B, F, H, W, 3] or torch [B, F, 3, H, W]; they have a "motion" too.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    clips = scoring_video.to_clips(images)
    seen: list[Any]
    wanted: list[Any]
    if clips is not None:
        wanted = [scoring_video.parse(prompt) for prompt in prompts]
        what, names, count = "videos", scoring_video.ATTRIBUTES, len(clips)
    else:
        wanted = [world.parse(prompt) for prompt in prompts]
        arrays = scoring_image.to_arrays(images)
        what, names, count = "images", world.ATTRIBUTES, len(arrays)
    if count != len(wanted):
        raise ValueError(f"got {count} {what} for {len(wanted)} prompts; they must be as many")
    if not count:
        raise ValueError("nothing to score: images and prompts are empty")
    seen = (
        [scoring_video.read(clip) for clip in clips]
        if clips is not None
        else [scoring_image.read(array) for array in arrays]
    )
    shares = {
        name: float(np.mean([getattr(s, name) == getattr(w, name) for s, w in zip(seen, wanted, strict=True)]))
        for name in names
    }
    return {"score": float(np.mean(list(shares.values()))), **shares}
