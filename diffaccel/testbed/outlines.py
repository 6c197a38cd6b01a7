"""The outlines of the scenes world: plain shapes and letters as signed distances, at half extent 1.

`y` points down and `x` right; any broadcastable form. Negative inside, roughly Euclidean near the edge.
"""

from __future__ import annotations

import math

import numpy as np

from . import world

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "ring", "star")
LETTERS: dict[
    str, tuple[tuple[float, float, float, float], ...]
] = {  # strokes (y0, x0, y1, x1), from centre to centre
    "e": ((-0.78, -0.5, 0.78, -0.5), (-0.78, -0.5, -0.78, 0.56), (0.0, -0.5, 0.0, 0.44), (0.78, -0.5, 0.78, 0.56)),
    "h": ((-0.78, -0.56, 0.78, -0.56), (-0.78, 0.56, 0.78, 0.56), (0.0, -0.56, 0.0, 0.56)),
    "k": ((-0.78, -0.5, 0.78, -0.5), (0.05, -0.5, -0.78, 0.54), (0.0, -0.36, 0.78, 0.54)),
    "t": ((-0.78, -0.66, -0.78, 0.66), (-0.78, 0.0, 0.78, 0.0)),
    "z": ((-0.78, -0.58, -0.78, 0.58), (-0.78, 0.58, 0.78, -0.58), (0.78, -0.58, 0.78, 0.58)),
}
KINDS: tuple[str, ...] = (*SHAPES, *LETTERS)
_STROKE = 0.22  # half the width of a letter's strokes


def distance(kind: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Signed distance of an object of half extent 1."""
    if kind in LETTERS:
        strokes = [_stroke(y, x, *ends) for ends in LETTERS[kind]]
        nearest: np.ndarray = np.minimum.reduce(strokes)
        return nearest
    if kind == "star":
        return _star(y, x)
    return world.shape_distance(kind, y, x)


def _stroke(y: np.ndarray, x: np.ndarray, y0: float, x0: float, y1: float, x1: float) -> np.ndarray:
    """A straight stroke with flat ends, which stand out by half its width."""
    length = math.hypot(y1 - y0, x1 - x0)
    down, across = (y1 - y0) / length, (x1 - x0) / length
    from_middle_y, from_middle_x = y - (y0 + y1) / 2, x - (x0 + x1) / 2
    along = np.abs(from_middle_y * down + from_middle_x * across) - length / 2 - _STROKE
    aside = np.abs(from_middle_x * down - from_middle_y * across) - _STROKE
    flat: np.ndarray = np.maximum(along, aside)
    return flat


def _star(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Five points, the first upwards."""
    outer, inner = 1.05, 0.46
    angle = np.abs((np.arctan2(x, -y) + math.pi / 5) % (2 * math.pi / 5) - math.pi / 5)  # 0 at a point, pi/5 between
    reach = np.hypot(x, y)
    along, aside = reach * np.cos(angle), reach * np.sin(angle)
    valley_along, valley_aside = inner * math.cos(math.pi / 5), inner * math.sin(math.pi / 5)
    normal_along, normal_aside = valley_aside, outer - valley_along
    length = math.hypot(normal_along, normal_aside)
    star: np.ndarray = ((along - outer) * normal_along + aside * normal_aside) / length
    return star
