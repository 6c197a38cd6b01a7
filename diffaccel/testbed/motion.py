"""The video world: the image world's scene, moving through its place in a straight line at a steady speed.

The caption is the image world's with the motion behind it: "..., moving right" or "..., standing still". The
place is where the shape is at half time; whatever the number of frames, it covers `TRAVEL` of the frame's
height or width. Large shapes at the edge of the frame may start or end partly outside.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

import numpy as np

from . import world
from .world import Scene

TRAVEL = 0.3
MOTIONS: dict[str, tuple[float, float]] = {  # (down, across) over the whole clip, fractions of height and width
    "still": (0.0, 0.0),
    "left": (0.0, -TRAVEL),
    "right": (0.0, TRAVEL),
    "up": (-TRAVEL, 0.0),
    "down": (TRAVEL, 0.0),
}
ATTRIBUTES: tuple[str, ...] = (*world.ATTRIBUTES, "motion")
TEMPLATE_COUNT = world.TEMPLATE_COUNT

_TEST_SHARE = 8  # one combination in eight is held out
_WORDING = re.compile(r",?\s*\b(?:moving\s+(left|right|up|down)|standing\s+(still))\b")


@dataclass(frozen=True)
class Clip:
    """The attributes a caption states: those of the scene at half time, and how it moves."""

    scene: Scene
    motion: str

    def caption(self, template: int = 0) -> str:
        """The canonical caption (template 0) or one of the training variants."""
        words = "standing still" if self.motion == "still" else f"moving {self.motion}"
        return f"{self.scene.caption(template)}, {words}"


def parse(caption: str) -> Clip:
    """Read the attributes back from a caption of this world."""
    found = [left or right for left, right in _WORDING.findall(caption.lower())]
    if len(found) != 1:
        example = Clip(Scene("ring", "red", "large", "left", "navy"), "right").caption()
        raise ValueError(
            f"cannot read one motion from the prompt {caption!r} (found {found}); "
            f"prompts of the video world look like {example!r}"
        )
    return Clip(world.parse(_WORDING.sub("", caption.lower())), found[0])


def is_test(clip: Clip) -> bool:
    """Whether this combination is held out of training: a fixed hash of its canonical caption."""
    return hashlib.sha256(clip.caption().encode()).digest()[0] % _TEST_SHARE == 0


@functools.cache
def combinations(split: str) -> tuple[Clip, ...]:
    """All clips of one split, in a fixed order."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    every = (Clip(scene, motion) for scene in world.every_scene() for motion in MOTIONS)
    return tuple(clip for clip in every if is_test(clip) == (split == "test"))


def render(clip: Clip, frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Draw a clip: float32 [frames, height, width, 3] in 0..1; the jitter depends on `seed` only."""
    down, across = MOTIONS[clip.motion]
    times = np.linspace(-0.5, 0.5, frames) if frames > 1 else np.zeros(1)
    return world.render_path(clip.scene, height, width, [(down * t, across * t) for t in times], seed)
