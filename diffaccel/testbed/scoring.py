"""How much of what a prompt asks for is in its picture or clip; what is seen there is read by `scoring_image`,
`scoring_video` and `scoring_scenes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from . import scenes, scoring_image, scoring_scenes, scoring_video, world


def score(images: Any, prompts: Sequence[str]) -> dict[str, float]:
    """Share of attributes that each picture or clip shows as its prompt states them, overall and per attribute.

    `images`: list of PIL images, numpy [B, H, W, 3] (uint8, or float in 0..1) or torch [B, 3, H, W] in 0..1.
    Videos: lists of frames, numpy [B, F, H, W, 3] or torch [B, F, 3, H, W]; they have a "motion" too.
    Pictures of the scenes world have other attributes; a thing's kind, colour and filling count as shares of the
    wanted things, "quarters" is 1 where things stand in the wanted quarters and nowhere else.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    clips = scoring_video.to_clips(images)
    if clips is not None:
        videos = [scoring_video.parse(prompt) for prompt in prompts]
        _same_number(len(clips), "videos", len(prompts))
        return _summary([_equal(scoring_video.read(c), v, scoring_video.ATTRIBUTES) for c, v in _pairs(clips, videos)])
    arrays = scoring_image.to_arrays(images)
    if _are_scenes(prompts):
        pictures = [scenes.parse(prompt) for prompt in prompts]
        _same_number(len(arrays), "images", len(prompts))
        return _summary([scoring_scenes.agreement(scoring_scenes.read(a), p) for a, p in _pairs(arrays, pictures)])
    wanted = [world.parse(prompt) for prompt in prompts]
    _same_number(len(arrays), "images", len(prompts))
    return _summary([_equal(scoring_image.read(a), w, world.ATTRIBUTES) for a, w in _pairs(arrays, wanted)])


def _are_scenes(prompts: Sequence[str]) -> bool:
    """Whether the first prompt is one of the scenes world, whose captions list things with a filling each."""
    try:
        return bool(prompts) and bool(scenes.parse(prompts[0]))
    except ValueError:
        return False


def _pairs(seen: Sequence[Any], wanted: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(seen, wanted, strict=True)


def _same_number(count: int, what: str, prompts: int) -> None:
    if count != prompts:
        raise ValueError(f"got {count} {what} for {prompts} prompts; they must be as many")
    if not count:
        raise ValueError("nothing to score: images and prompts are empty")


def _equal(seen: Any, wanted: Any, names: Sequence[str]) -> dict[str, float]:
    return {name: float(getattr(seen, name) == getattr(wanted, name)) for name in names}


def _summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over pictures of each attribute, and over attributes."""
    shares = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {"score": float(np.mean(list(shares.values()))), **shares}
