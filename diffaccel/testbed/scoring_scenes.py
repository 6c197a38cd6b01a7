"""Read a picture of the scenes world by plain image analysis (numpy only): its ground, and the thing in each quarter.

The ground's two tones lie on a short line of colours; what is far from it is a thing. Its kind is the outline that
covers it best, its colour the direction from cream it lies in, its filling the pattern that leaves the least error.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from . import outlines
from .scenes import (
    ATTRIBUTES,
    BITS,
    COLOURS,
    CREAM,
    GROUNDS,
    LIGHTER,
    PATTERNS,
    PERIODS,
    PHASE,
    QUARTERS,
    RIM,
    TURN,
    Picture,
    Thing,
    pattern_share,
)

_MIN_CONTRAST = 0.17  # a pixel further than this (RGB distance) from both tones of the ground is a thing's
_MIN_AREA = 0.012  # of a thing, in squares of the shorter side
_FREEDOM = 2.0  # how much better a checked pattern has to fit, as each of its cells is open
_FLAT = 1e-4  # and by at least this
_FREE = ("checked", "dotted")
_TURNS = np.linspace(-TURN, TURN, 7)
_PHASES = tuple(itertools.product(np.linspace(-PHASE, PHASE, 5), repeat=2))


def agreement(seen: Picture, wanted: Picture) -> dict[str, float]:
    """Share of each attribute of one picture that is as wanted: over the wanted things, or 0 or 1."""
    found = {thing.quarter: thing for thing in seen.things}
    shares = {
        name: float(np.mean([_same(found.get(thing.quarter), thing, name) for thing in wanted.things]))
        for name in ("kind", "colour", "filling")
    }
    places = {thing.quarter for thing in wanted.things}
    shares |= {"quarters": float(found.keys() == places)}
    shares |= {"ground": float(seen.ground == wanted.ground), "pattern": float(seen.pattern == wanted.pattern)}
    return {name: shares[name] for name in ATTRIBUTES}


def _same(seen: Thing | None, wanted: Thing, name: str) -> bool:
    return seen is not None and bool(getattr(seen, name) == getattr(wanted, name))


def read(image: np.ndarray) -> Picture:
    """What one picture [H, W, 3] in 0..1 shows."""
    height, width = image.shape[:2]
    side = min(height, width)
    ground, far = _ground(image)
    mask = far > _MIN_CONTRAST
    things = []
    for quarter, (down, across) in QUARTERS.items():
        rows = slice(0, height // 2) if down < 0.5 else slice(height // 2, height)
        columns = slice(0, width // 2) if across < 0.5 else slice(width // 2, width)
        part = mask[rows, columns]
        if part.sum() >= _MIN_AREA * side**2:
            things.append(_thing(image[rows, columns], part, side, quarter))
    return Picture(tuple(things), ground, _pattern(image, ground, mask, side))


def _ground(image: np.ndarray) -> tuple[str, np.ndarray]:
    """Name of the ground, and how far each pixel [H, W] lies from its tones."""
    distances = {}
    for name, tone in GROUNDS.items():
        along = np.clip((image - np.asarray(tone)).mean(axis=-1, keepdims=True), 0.0, LIGHTER)
        distances[name] = np.linalg.norm(image - tone - along, axis=-1)
    border = np.ones(image.shape[:2], bool)
    border[2:-2, 2:-2] = False
    name = min(distances, key=lambda key: float(np.mean(np.minimum(distances[key][border], 0.3))))
    return name, distances[name]


def _pattern(image: np.ndarray, ground: str, mask: np.ndarray, side: int) -> str:
    grown = mask.copy()
    for axis, step in itertools.product((0, 1), (-1, 1)):
        grown |= np.roll(mask, step, axis)
    free = ~grown
    share = np.clip((image - np.asarray(GROUNDS[ground])).mean(axis=-1) / LIGHTER, -0.2, 1.2)
    if not free.any():
        return PATTERNS[0]
    height, width = mask.shape
    y, x = (np.arange(height)[:, None] + 0.5) / side, (np.arange(width)[None] + 0.5) / side
    errors: dict[str, float] = {}
    for pattern, (phase_y, phase_x) in itertools.product(PATTERNS, _PHASES):
        for drawn in _drawn(pattern, y + phase_y, x + phase_x, PERIODS["ground"], side, share, free):
            error = float(np.square(share - drawn)[free].mean())
            errors[pattern] = min(errors.get(pattern, np.inf), error)
    name = _simplest(errors)
    if name in _FREE:  # a dot fits a cell well, but dots cover a seventh of the ground and cells half
        return "dotted" if share[free].mean() < 0.3 else "checked"
    return name


def _simplest(errors: dict[str, float]) -> str:
    """The pattern of the least error, where free cells have to be better by more than freedom gives."""
    return min(errors, key=lambda key: errors[key] * (_FREEDOM if key == "checked" else 1.0) + _FLAT * (key in _FREE))


def _drawn(
    pattern: str, y: np.ndarray, x: np.ndarray, period: float, side: int, share: np.ndarray, seen: np.ndarray
) -> Iterator[np.ndarray]:
    """The pattern at one phase with the bits that fit a share [H, W] of its second tone best where it is `seen`."""
    none = np.zeros((BITS, BITS), dtype=int)
    if pattern in ("checked", "dotted"):
        finer = 2.0 if pattern == "checked" else 1.0
        rows, columns = np.broadcast_arrays(y * finer / period, x * finer / period)
        ink = seen if pattern == "checked" else seen & (np.hypot(rows % 1.0 - 0.5, columns % 1.0 - 0.5) < 0.25)
        cells = (np.floor(rows).astype(int) % BITS * BITS + np.floor(columns).astype(int) % BITS)[ink]
        total = np.bincount(cells, share[ink], minlength=BITS**2)
        count = np.bincount(cells, minlength=BITS**2)
        yield pattern_share(pattern, y, x, period, side, (total > 0.5 * count).astype(int).reshape(BITS, BITS))
    else:
        yield pattern_share(pattern, y, x, period, side, none)
        if pattern == "striped":
            yield pattern_share(pattern, y, x, period, side, none + 1)


def _thing(image: np.ndarray, mask: np.ndarray, side: int, quarter: str) -> Thing:
    kind, inside, own_y, own_x = _fit(mask, side)
    colour, cream = _colour(image, inside > 0.5)
    errors: dict[str, float] = {}
    for filling, drawn in _fillings(kind, inside, own_y, own_x, side, cream):
        errors[filling] = min(errors.get(filling, np.inf), float(np.square(cream - drawn)[inside > 0.5].mean()))
    return Thing(kind, colour, _simplest(errors), quarter)


def _fillings(
    kind: str, inside: np.ndarray, own_y: np.ndarray, own_x: np.ndarray, side: int, cream: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Every filling in every phase as a share of cream [H, W], like `cream`; a round thing's turn is open too."""
    yield "solid", np.zeros_like(inside)
    yield "outlined", np.clip(0.5 + RIM * side - inside, 0.0, 1.0)
    for turn in _TURNS if kind in ("circle", "ring") else (0.0,):
        cos, sin = np.cos(turn), np.sin(turn)
        y, x = cos * own_y - sin * own_x, sin * own_y + cos * own_x
        for filling, (phase_y, phase_x) in itertools.product(("striped", "checked"), _PHASES):
            at = (y + phase_y, x + phase_x, PERIODS[filling], side)
            yield from ((filling, drawn) for drawn in _drawn(filling, *at, cream, inside > 0.5))


@functools.cache
def _unit(kind: str) -> tuple[float, float, float]:
    """(area, centroid down, centroid across) of a kind at half extent 1, by counting a fine grid."""
    grid = np.linspace(-1.2, 1.2, 241)
    y, x = np.broadcast_arrays(grid[:, None], grid[None])
    inside = outlines.distance(kind, y, x) < 0
    area = inside.sum() * (grid[1] - grid[0]) ** 2
    return float(area), float(y[inside].mean()), float(x[inside].mean())


def _fit(mask: np.ndarray, side: int) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """The kind whose outline covers a mask best; pixels inside its edge, and its own coordinates in shorter sides."""
    y, x = (np.arange(mask.shape[0])[:, None] + 0.5), (np.arange(mask.shape[1])[None] + 0.5)
    at = np.argwhere(mask).mean(axis=0) + 0.5
    best: tuple[float, str, np.ndarray, np.ndarray, np.ndarray] | None = None
    for kind, turn in itertools.product(outlines.KINDS, _TURNS):
        area, down, across = _unit(kind)
        radius = np.sqrt(mask.sum() / area)
        cos, sin = np.cos(turn), np.sin(turn)
        from_y, from_x = (y - at[0]) / radius, (x - at[1]) / radius
        own_y, own_x = cos * from_y - sin * from_x + down, sin * from_y + cos * from_x + across
        inside = -outlines.distance(kind, own_y, own_x) * radius
        cover = np.clip(0.5 + inside, 0.0, 1.0)
        overlap = float(np.minimum(cover, mask).sum() / np.maximum(cover, mask).sum())
        if best is None or overlap > best[0]:
            best = (overlap, kind, inside, own_y * radius / side, own_x * radius / side)
    assert best is not None
    return best[1:]


def _colour(image: np.ndarray, body: np.ndarray) -> tuple[str, np.ndarray]:
    """The colour most of a thing lies towards, seen from cream; and each pixel's share of cream [H, W]."""
    away = image - np.asarray(CREAM)
    errors, shares = [], []
    for colour in COLOURS.values():
        way = np.asarray(colour) - np.asarray(CREAM)
        share = np.clip((away @ way) / (way @ way), 0.0, 1.2)
        shares.append(share)
        errors.append(np.linalg.norm(away - share[..., None] * way, axis=-1))
    nearest = np.argmin(errors, axis=0)
    votes = [float((shares[i] * (nearest == i))[body].sum()) for i in range(len(COLOURS))]
    chosen = int(np.argmax(votes))
    return list(COLOURS)[chosen], np.clip(1.0 - shares[chosen], 0.0, 1.0)
