"""The scenes world: two or three shapes and letters with their own fillings on a patterned ground, at any resolution.

A caption states what each object is and in which quarter it stands; turn, place within the quarter, size, light and
every pattern's phase, direction and cells are left open, so a picture has to decide them on its way.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from . import outlines
from .outlines import KINDS, LETTERS, SHAPES

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.10, 0.12),
    "orange": (0.99, 0.55, 0.02),
    "yellow": (0.98, 0.93, 0.10),
    "green": (0.08, 0.66, 0.18),
    "cyan": (0.08, 0.86, 0.92),
    "pink": (0.98, 0.45, 0.75),
}
FILLINGS: tuple[str, ...] = ("solid", "striped", "checked", "outlined")
GROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.04, 0.04, 0.05),
    "navy": (0.05, 0.08, 0.34),
    "grey": (0.42, 0.42, 0.44),
    "brown": (0.34, 0.19, 0.09),
}
PATTERNS: tuple[str, ...] = ("plain", "striped", "checked", "dotted")
CREAM = (1.0, 0.97, 0.90)  # the second tone of fillings, and the outline
LIGHTER = 0.22  # how much lighter the second tone of a ground is
QUARTERS: dict[str, tuple[float, float]] = {  # centres (down, across), fractions of height and width
    "top left": (0.27, 0.27),
    "top right": (0.27, 0.73),
    "bottom left": (0.73, 0.27),
    "bottom right": (0.73, 0.73),
}
ATTRIBUTES: tuple[str, ...] = ("quarters", "kind", "colour", "filling", "ground", "pattern")
TEMPLATE_COUNT = 3
RADIUS = 0.185  # half extent / shorter side
TURN = 0.5  # largest, in radians
RIM = 0.022  # width of an outline / shorter side
PERIODS = {"striped": 0.12, "checked": 0.15, "ground": 0.14}  # of patterns / shorter side
PHASE = 0.05  # largest displacement of a pattern / shorter side
BITS = 32  # cells of a pattern that repeat, more than a picture has
_TEST_SHARE = 8  # one scene in eight is held out


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    kind: str
    colour: str
    filling: str
    quarter: str

    def words(self) -> str:
        """Its part of a caption."""
        return f"{self.filling} {self.colour} {self.kind} {self.quarter}"


@dataclass(frozen=True)
class Picture:
    """What a caption states; things in the order of QUARTERS."""

    things: tuple[Thing, ...]
    ground: str
    pattern: str

    def caption(self, template: int = 0) -> str:
        """The canonical caption (template 0) or one of the training variants."""
        ground = f"{self.pattern} {self.ground} background"
        things = [thing.words() for thing in (reversed(self.things) if template == 2 else self.things)]
        return ", ".join([ground, *things] if template == 1 else [*things, ground])


def words() -> list[str]:
    """Every word of every caption, sorted; the comma counts as one."""
    quarters = " ".join(QUARTERS).split()
    return sorted({*KINDS, *COLOURS, *FILLINGS, *GROUNDS, *PATTERNS, *quarters, "background", ","})


def parse(caption: str) -> Picture:
    """Read a caption of this world back; raises ValueError on any other text."""
    things: dict[str, Thing] = {}
    grounds: list[tuple[str, str]] = []
    for part in caption.lower().split(","):
        match part.split():
            case [pattern, ground, "background"] if pattern in PATTERNS and ground in GROUNDS:
                grounds.append((ground, pattern))
            case [filling, colour, kind, down, across] if (
                filling in FILLINGS and colour in COLOURS and kind in KINDS and f"{down} {across}" in QUARTERS
            ):
                things[f"{down} {across}"] = Thing(kind, colour, filling, f"{down} {across}")
            case _:
                raise ValueError(f"cannot read {part.strip()!r} of a prompt of scenes; prompts look like {EXAMPLE!r}")
    if len(grounds) != 1 or not things or len(things) + 1 != caption.count(",") + 1:
        raise ValueError(f"a prompt of scenes has one background and things in different quarters, like {EXAMPLE!r}")
    ordered = tuple(things[quarter] for quarter in QUARTERS if quarter in things)
    return Picture(ordered, *grounds[0])


EXAMPLE = "striped red ring top left, outlined yellow k bottom right, dotted navy background"


def is_test(picture: Picture) -> bool:
    """Whether this scene is held out of training: a fixed hash of its canonical caption."""
    return hashlib.sha256(picture.caption().encode()).digest()[0] % _TEST_SHARE == 0


def sample(split: str, seed: int | tuple[int, int]) -> Picture:
    """Scene number `seed` (or a number of a stream) of one split, "train" or "test"."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    numbers = seed if isinstance(seed, tuple) else (seed,)
    draw = np.random.default_rng((*numbers, 11))
    while True:
        places = sorted(draw.permutation(4)[: 2 + int(draw.random() < 0.8)])
        things = tuple(
            Thing(_outline(draw), _one(draw, tuple(COLOURS)), _textured(draw, FILLINGS), tuple(QUARTERS)[place])
            for place in places
        )
        picture = Picture(things, _one(draw, tuple(GROUNDS)), _textured(draw, PATTERNS))
        if is_test(picture) == (split == "test"):
            return picture


def _one(draw: np.random.Generator, names: tuple[str, ...]) -> str:
    return names[int(draw.integers(len(names)))]


def _outline(draw: np.random.Generator) -> str:
    """A letter in seven cases of ten."""
    return _one(draw, tuple(LETTERS) if draw.random() < 0.7 else SHAPES)


def _textured(draw: np.random.Generator, names: tuple[str, ...]) -> str:
    """One of `names`, the first of which, without any texture, comes in one case of ten."""
    return names[0] if draw.random() < 0.1 else _one(draw, names[1:])


def render(picture: Picture, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Draw a scene: float32 [height, width, 3] in 0..1; what the caption leaves open depends on `seed` only."""
    draw = np.random.default_rng((seed, 12))
    side = min(height, width)
    y, x = (np.arange(height)[:, None] + 0.5) / side, (np.arange(width)[None] + 0.5) / side  # in shorter sides
    made = _ground(picture, y, x, side, draw)
    for thing in picture.things:
        _put(made, thing, y, x, (height / side, width / side), side, draw)
    drawn: np.ndarray = np.clip(made, 0.0, 1.0).astype(np.float32)
    return drawn


def _ground(picture: Picture, y: np.ndarray, x: np.ndarray, side: int, draw: np.random.Generator) -> np.ndarray:
    phase_y, phase_x, light = draw.uniform(-1.0, 1.0, size=3)
    first = np.asarray(GROUNDS[picture.ground]) * (1.0 + 0.06 * light)
    y, x, period = y + PHASE * phase_y, x + PHASE * phase_x, PERIODS["ground"]
    share = pattern_share(picture.pattern, y, x, period, side, draw.integers(0, 2, size=(BITS, BITS)))
    made: np.ndarray = first + LIGHTER * share[..., None]
    return made


def pattern_share(
    pattern: str, y: np.ndarray, x: np.ndarray, period: float, side: int, bits: np.ndarray
) -> np.ndarray:
    """Share 0..1 of the second tone, its edges soft by one pixel; `bits` [BITS, BITS] of 0 and 1 are left to chance.

    Stripes are diagonal and go the one way or the other by the first bit; a checked pattern has a bit for each of its
    cells, a dotted one for each of its dots.
    """
    down, across = y / period, x / period
    if pattern == "striped":
        across = across if bits[0, 0] else -across
        inside = 0.25 - np.abs((down + across) / np.sqrt(2.0) % 1.0 - 0.5)
        share: np.ndarray = np.clip(0.5 + inside * period * side, 0.0, 1.0)
    elif pattern == "checked":
        rows, columns = np.broadcast_arrays(2.0 * down - 0.5, 2.0 * across - 0.5)
        above, before = np.floor(rows).astype(int), np.floor(columns).astype(int)
        low, right = (np.clip(0.5 + (at % 1.0 - 0.5) * period * side / 2, 0.0, 1.0) for at in (rows, columns))
        cells = [[bits[(above + i) % BITS, (before + j) % BITS] for j in (0, 1)] for i in (0, 1)]
        upper, lower = (left + (other - left) * right for left, other in cells)
        share = upper + (lower - upper) * low
    elif pattern == "dotted":
        inside = 0.30 - np.hypot(down % 1.0 - 0.5, across % 1.0 - 0.5)
        there = bits[np.floor(down).astype(int) % BITS, np.floor(across).astype(int) % BITS]
        share = np.clip(0.5 + inside * period * side, 0.0, 1.0) * there
    else:
        share = np.zeros(np.broadcast_shapes(y.shape, x.shape))
    return share


def _put(
    made: np.ndarray,
    thing: Thing,
    y: np.ndarray,
    x: np.ndarray,
    extent: tuple[float, float],
    side: int,
    draw: np.random.Generator,
) -> None:
    """Draw one thing over `made` in place."""
    jitter = draw.uniform(-1.0, 1.0, size=7)
    down, across = QUARTERS[thing.quarter]
    radius = RADIUS * (1.0 + 0.10 * jitter[0])
    down, across = down * extent[0] + 0.03 * jitter[1], across * extent[1] + 0.03 * jitter[2]
    cos, sin = np.cos(TURN * jitter[3]), np.sin(TURN * jitter[3])
    from_y, from_x = (y - down) / radius, (x - across) / radius
    own_y, own_x = cos * from_y - sin * from_x, sin * from_y + cos * from_x

    inside = -outlines.distance(thing.kind, own_y, own_x) * radius * side  # pixels
    cover = np.clip(0.5 + inside, 0.0, 1.0)[..., None]
    light = np.clip(1.0 + 0.05 * jitter[4] - 0.10 * (from_y + from_x), 0.8, 1.15)[..., None]
    colour, cream = np.asarray(COLOURS[thing.colour]) * light, np.asarray(CREAM)
    if thing.filling == "outlined":
        share = np.clip(0.5 + RIM * side - inside, 0.0, 1.0)
    elif thing.filling == "solid":
        share = np.zeros_like(inside)
    else:
        down, across = own_y * radius + PHASE * jitter[5], own_x * radius + PHASE * jitter[6]
        bits = draw.integers(0, 2, size=(BITS, BITS))
        share = pattern_share(thing.filling, down, across, PERIODS[thing.filling], side, bits)
    body = colour + (cream - colour) * share[..., None]
    made *= 1.0 - cover
    made += cover * body
