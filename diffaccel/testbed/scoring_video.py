"""Read a clip's attributes from its pixels: the picture reader on a few frames, and a line through the centres."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import motion, scoring_image
from .motion import ATTRIBUTES, MOTIONS

__all__ = ["ATTRIBUTES", "Seen", "parse", "read", "to_clips"]

_AROUND_HALF_TIME = (0.375, 0.5, 0.625)  # where shape, colour, size, place and ground are read
_TRACKED = 9  # frames, at most, through whose centres the motion is fitted


@dataclass(frozen=True)
class Seen:
    """The attributes of one clip as read, or as a prompt states them; "" where they cannot be seen."""

    shape: str
    colour: str
    size: str
    place: str
    ground: str
    motion: str


def parse(prompt: str) -> Seen:
    """The attributes that a prompt of the video world states."""
    clip = motion.parse(prompt)
    scene = clip.scene
    return Seen(scene.shape, scene.colour, scene.size, scene.place, scene.ground, clip.motion)


def to_clips(videos: Any) -> list[np.ndarray] | None:
    """Clips as float [F, H, W, 3] in 0..1, or None where `videos` has the form of pictures."""
    if hasattr(videos, "detach") or isinstance(videos, np.ndarray):
        if videos.ndim != 5:
            return None
        wanted = 2 if hasattr(videos, "detach") else 4  # where the three colours lie
        if videos.shape[wanted] != 3:
            form = (
                "torch batch of videos must be [B, F, 3, H, W]"
                if wanted == 2
                else "numpy batch must be [B, F, H, W, 3]"
            )
            raise ValueError(f"a {form}, got {list(videos.shape)}")
        return [np.stack(scoring_image.to_arrays(video)) for video in videos]
    if not isinstance(videos, Sequence) or not videos:
        return None
    if all(isinstance(video, np.ndarray) and video.ndim == 4 for video in videos) or all(
        isinstance(video, (list, tuple)) and len(video) for video in videos
    ):
        return [np.stack(scoring_image.to_arrays(video)) for video in videos]
    return None


def read(clip: np.ndarray) -> Seen:
    """What one clip [F, H, W, 3] in 0..1 shows: most frequent around half time; the place is the mean there."""
    last = len(clip) - 1
    middle = [scoring_image.look(clip[i]) for i in sorted({round(at * last) for at in _AROUND_HALF_TIME})]
    centres = [frame.centre for frame in middle if frame.centre is not None]
    place = (
        scoring_image.nearest_place((float(np.mean([c[0] for c in centres])), float(np.mean([c[1] for c in centres]))))
        if centres
        else ""
    )

    def most(name: str) -> str:
        seen: list[str] = [getattr(frame, name) for frame in reversed(middle)]
        return Counter(seen).most_common(1)[0][0]

    return Seen(most("shape"), most("colour"), most("size"), place, most("ground"), _motion(clip))


def _motion(clip: np.ndarray) -> str:
    """The motion whose way is nearest to the way of the centre by a straight line through it; "" without two."""
    last = len(clip) - 1
    times, centres = [], []
    for index in sorted({round(i) for i in np.linspace(0, last, _TRACKED)}):
        centre = scoring_image.look(clip[index]).centre
        if centre is not None:
            times.append(index / max(last, 1))
            centres.append(centre)
    if len(times) < 2:
        return ""
    way = np.polyfit(times, np.array(centres), 1)[0]  # (down, across) over the whole clip
    return min(MOTIONS, key=lambda name: float(np.hypot(*(way - np.array(MOTIONS[name])))))
