"""The image world: one shaded shape on a shaded ground, drawn by our own code at any resolution.

A scene is five attributes (shape, colour, size, place, ground) plus a small seeded jitter; the caption
states the attributes. Lengths are fractions: places of height and width, radii of the shorter side.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "ring", "cross", "diamond")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.12, 0.14),
    "orange": (0.98, 0.55, 0.05),
    "yellow": (0.98, 0.92, 0.15),
    "green": (0.10, 0.62, 0.20),
    "cyan": (0.10, 0.85, 0.90),
    "blue": (0.12, 0.30, 0.92),
    "purple": (0.56, 0.14, 0.72),
    "pink": (0.98, 0.50, 0.75),
}
GROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.05, 0.05, 0.06),
    "white": (0.95, 0.95, 0.94),
    "grey": (0.50, 0.50, 0.52),
    "navy": (0.05, 0.08, 0.34),
    "brown": (0.36, 0.21, 0.10),
    "beige": (0.86, 0.78, 0.60),
}
SIZES: dict[str, float] = {"small": 0.12, "medium": 0.175, "large": 0.25}  # half extent / shorter side
PLACES: dict[str, tuple[float, float]] = {  # (down, across), fractions of height and width
    "top left": (0.3, 0.3),
    "top": (0.3, 0.5),
    "top right": (0.3, 0.7),
    "left": (0.5, 0.3),
    "centre": (0.5, 0.5),
    "right": (0.5, 0.7),
    "bottom left": (0.7, 0.3),
    "bottom": (0.7, 0.5),
    "bottom right": (0.7, 0.7),
}
ATTRIBUTES: tuple[str, ...] = ("shape", "colour", "size", "place", "ground")

_TEST_SHARE = 8  # one combination in eight is held out
_TEMPLATES: tuple[str, ...] = (
    "a {size} {colour} {shape} {where} on a {ground} background",
    "{size} {colour} {shape} {where}, {ground} background",
    "on a {ground} background, a {size} {colour} {shape} {where}",
)


@dataclass(frozen=True)
class Scene:
    """The attributes a caption states."""

    shape: str
    colour: str
    size: str
    place: str
    ground: str

    def caption(self, template: int = 0) -> str:
        """The canonical caption (template 0) or one of the training variants."""
        where = f"{'in' if self.place == 'centre' else 'at'} the {self.place}"
        return _TEMPLATES[template].format(
            size=self.size, colour=self.colour, shape=self.shape, where=where, ground=self.ground
        )


TEMPLATE_COUNT = len(_TEMPLATES)


def parse(caption: str) -> Scene:
    """Read the attributes back from a caption of this world; the words of no two attributes overlap."""
    words = caption.lower().replace(",", " ").replace(".", " ").split()
    if "moving" in words or "standing" in words:
        raise ValueError(
            f"cannot read the prompt {caption!r} as a picture's: it states a motion, so it belongs to a video"
        )
    found: dict[str, str] = {}
    for name, values in (("shape", SHAPES), ("colour", COLOURS), ("size", SIZES), ("ground", GROUNDS)):
        hits = [word for word in words if word in values]
        if len(hits) != 1:
            raise ValueError(
                f"cannot read one {name} from the prompt {caption!r} (found {hits}); "
                f"prompts of this world look like {Scene('ring', 'red', 'large', 'left', 'navy').caption()!r}"
            )
        found[name] = hits[0]
    place = " ".join(word for word in words if word in ("top", "bottom", "left", "right", "centre"))
    if place not in PLACES:
        raise ValueError(f"cannot read a place from the prompt {caption!r}; places are {', '.join(PLACES)}")
    return Scene(place=place, **found)


def is_test(scene: Scene) -> bool:
    """Whether this combination is held out of training: a fixed hash of its canonical caption."""
    return hashlib.sha256(scene.caption().encode()).digest()[0] % _TEST_SHARE == 0


def combinations(split: str) -> list[Scene]:
    """All scenes of one split, in a fixed order."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    return [scene for scene in every_scene() if is_test(scene) == (split == "test")]


def every_scene() -> Iterator[Scene]:
    """All scenes of both splits, in a fixed order."""
    return (Scene(*values) for values in itertools.product(SHAPES, COLOURS, SIZES, PLACES, GROUNDS))


def shape_distance(shape: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Signed distance (negative inside, roughly Euclidean near the edge) of a shape of half extent 1.

    `y` points down and `x` right, both in units of the half extent; any broadcastable form.
    """
    distance: np.ndarray = _distance(shape, y, x)
    return distance


def _distance(shape: str, y: np.ndarray, x: np.ndarray) -> Any:
    ax, ay = np.abs(x), np.abs(y)
    if shape == "circle":
        return np.hypot(x, y) - 1.0
    if shape == "square":
        return np.maximum(ax, ay) - 0.92
    if shape == "triangle":  # apex up, base down
        return np.maximum(y - 0.85, (2.0 * ax - y - 1.0) / np.sqrt(5.0))
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.74) - 0.26
    if shape == "cross":
        return np.minimum(np.maximum(ax - 1.0, ay - 0.34), np.maximum(ax - 0.34, ay - 1.0))
    if shape == "diamond":
        return (1.35 * ax + ay - 1.0) / np.hypot(1.35, 1.0)
    raise ValueError(f"unknown shape {shape!r}; shapes are {', '.join(SHAPES)}")


def render(scene: Scene, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Draw a scene: float32 [height, width, 3] in 0..1; the jitter depends on `seed` only."""
    picture: np.ndarray = render_path(scene, height, width, [(0.0, 0.0)], seed)[0]
    return picture


def render_path(
    scene: Scene, height: int, width: int, shifts: Sequence[tuple[float, float]], seed: int = 0
) -> np.ndarray:
    """Draw a scene once per shift (down, across) of its shape, in fractions of height and width.

    float32 [len(shifts), height, width, 3] in 0..1; the jitter depends on `seed` only and is that of `render`.
    """
    jitter = np.random.default_rng(seed).uniform(-1.0, 1.0, size=7)
    side = min(height, width)
    radius = SIZES[scene.size] * side * (1.0 + 0.05 * jitter[0])
    down, across = PLACES[scene.place]
    moved = np.asarray(shifts, dtype=np.float64).reshape(-1, 2, 1, 1)  # [F, 2, 1, 1]
    centre_y = (down + 0.015 * jitter[1] + moved[:, 0]) * height
    centre_x = (across + 0.015 * jitter[2] + moved[:, 1]) * width
    y, x = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij", sparse=True)
    down_f, across_f = y / height - 0.5, x / width - 0.5  # -0.5 .. 0.5

    unit_y, unit_x = (y - centre_y) / radius, (x - centre_x) / radius  # [F, H, 1], [F, 1, W]
    cover = np.clip(0.5 - shape_distance(scene.shape, unit_y, unit_x) * radius, 0.0, 1.0)[..., None]

    ground_light = 1.0 + 0.02 * jitter[3] - 0.16 * down_f + 0.0 * across_f  # lit from above
    shape_light = np.clip(1.0 + 0.02 * jitter[4] - 0.10 * (unit_x + unit_y), 0.8, 1.2)  # from the top left
    ground = np.asarray(GROUNDS[scene.ground]) * ground_light[..., None]
    colour = np.asarray(COLOURS[scene.colour]) * shape_light[..., None]
    pictures = ground * (1.0 - cover) + colour * cover
    made: np.ndarray = np.clip(pictures, 0.0, 1.0).astype(np.float32)
    return made
