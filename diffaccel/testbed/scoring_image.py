"""Read shape, colour, size, place and ground from pixels by plain image analysis (numpy only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .world import COLOURS, GROUNDS, PLACES, SHAPES, SIZES, Scene, shape_distance

_MIN_CONTRAST = 0.16  # a pixel further than this (RGB distance) from the ground may be foreground


def to_arrays(images: Any) -> list[np.ndarray]:
    """A PIL list, numpy [B, H, W, 3] or torch [B, 3, H, W] as a list of float [H, W, 3] in 0..1."""
    if hasattr(images, "detach"):  # torch [B, 3, H, W]
        tensor = images.detach().float().cpu().numpy()
        if tensor.ndim != 4 or tensor.shape[1] != 3:
            raise ValueError(f"a torch batch of images must be [B, 3, H, W], got {list(tensor.shape)}")
        return list(tensor.transpose(0, 2, 3, 1))
    if isinstance(images, np.ndarray):
        if images.ndim != 4 or images.shape[-1] != 3:
            raise ValueError(f"a numpy batch of images must be [B, H, W, 3], got {list(images.shape)}")
        return [_unit(image) for image in images]
    if hasattr(images, "convert"):  # a single PIL image
        images = [images]
    out = []
    for image in images:
        if hasattr(image, "detach"):
            out.extend(to_arrays(image[None] if image.ndim == 3 else image))
            continue
        array = _unit(np.asarray(image.convert("RGB") if hasattr(image, "convert") else image))
        if array.ndim != 3 or array.shape[-1] != 3:
            raise ValueError(f"each image must be [H, W, 3], got {list(array.shape)}")
        out.append(array)
    return out


def _unit(image: np.ndarray) -> np.ndarray:
    return image.astype(np.float32) / 255.0 if image.dtype == np.uint8 else image.astype(np.float32)


def _nearest(rgb: np.ndarray, palette: dict[str, tuple[float, float, float]]) -> str:
    """The palette entry nearest to `rgb` [3] up to a common light factor of 0.85 to 1.15."""
    lights = np.array([0.85, 0.92, 1.0, 1.08, 1.15])
    entries = np.clip(lights[:, None, None] * np.array(list(palette.values()))[None], 0.0, 1.0)
    distance = np.linalg.norm(entries - rgb, axis=-1) + 0.3 * np.abs(lights - 1.0)[:, None]
    return list(palette)[int(distance.min(axis=0).argmin())]


def _biggest_part(mask: np.ndarray) -> np.ndarray:
    """The largest 4-connected part of a boolean mask [H, W]: runs of each row, joined where they touch."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    starts, stops = np.argwhere(edges == 1), np.argwhere(edges == -1)[:, 1]
    runs = [(int(row), int(start), int(stop)) for (row, start), stop in zip(starts, stops, strict=True)]
    part = list(range(len(runs)))  # union-find: each run points towards the root of its part

    def root(run: int) -> int:
        while part[run] != run:
            run = part[run]
        return run

    above = 0
    for current, (row, start, stop) in enumerate(runs):
        while runs[above][0] < row - 1 or (runs[above][0] == row - 1 and runs[above][2] <= start):
            above += 1
        touching = above
        while runs[touching][0] == row - 1 and runs[touching][1] < stop:
            part[root(touching)] = root(current)
            touching += 1

    sizes: dict[int, int] = {}
    for run, (_, start, stop) in enumerate(runs):
        sizes[root(run)] = sizes.get(root(run), 0) + stop - start
    biggest = max(sizes, key=lambda name: sizes[name])
    kept = np.zeros_like(mask)
    for run, (row, start, stop) in enumerate(runs):
        if root(run) == biggest:
            kept[row, start:stop] = True
    return kept


def _fit(cover: np.ndarray) -> tuple[str, float, float, float]:
    """Best (shape, half extent, centre down, centre across) in pixels for a soft cover map [H, W] in 0..1.

    Every shape is drawn with the cover's own area and centroid at a few scales; the highest soft
    intersection over union wins.
    """
    rows, columns = (np.flatnonzero(cover.any(axis=axis)) for axis in (1, 0))
    top, left = max(0, rows[0] - 3), max(0, columns[0] - 3)  # only the surroundings of the shape
    cover = cover[top : rows[-1] + 4, left : columns[-1] + 4]
    height, width = cover.shape
    y, x = np.arange(top, top + height)[:, None] + 0.5, np.arange(left, left + width)[None] + 0.5
    area = cover.sum()
    cy, cx = (cover * y).sum() / area, (cover * x).sum() / area
    best = (-1.0, SHAPES[0], 1.0, cy, cx)
    for shape in SHAPES:
        unit_area, unit_down = _UNIT[shape]
        base = np.sqrt(area / unit_area)
        for scale in (0.92, 0.96, 1.0, 1.04, 1.08):
            radius = base * scale
            centre_y = cy - unit_down * radius  # the triangle's centroid lies below its box centre
            ideal = np.clip(0.5 - shape_distance(shape, (y - centre_y) / radius, (x - cx) / radius) * radius, 0, 1)
            overlap = np.minimum(ideal, cover).sum() / np.maximum(ideal, cover).sum()
            if overlap > best[0]:
                best = (overlap, shape, radius, centre_y, cx)
    return best[1], best[2], best[3], best[4]


def _unit_moments() -> dict[str, tuple[float, float]]:
    """(area, centroid down) of each shape at half extent 1, by counting a fine grid."""
    grid = np.linspace(-1.1, 1.1, 441)
    y, x = grid[:, None], grid[None]
    moments = {}
    for shape in SHAPES:
        inside = shape_distance(shape, y, x) < 0
        moments[shape] = (inside.sum() * (grid[1] - grid[0]) ** 2, float((inside * y).sum() / inside.sum()))
    return moments


_UNIT = _unit_moments()


@dataclass(frozen=True)
class Sight:
    """What one picture shows; only the ground is known (the rest "" and None) where nothing stands out from it."""

    ground: str
    shape: str = ""
    colour: str = ""
    size: str = ""
    centre: tuple[float, float] | None = None  # (down, across), fractions of height and width


def nearest_place(centre: tuple[float, float] | None) -> str:
    """The place nearest to a centre, or "" without one."""
    if centre is None:
        return ""
    return min(PLACES, key=lambda name: (centre[0] - PLACES[name][0]) ** 2 + (centre[1] - PLACES[name][1]) ** 2)


def read(image: np.ndarray) -> Scene:
    """The scene seen in one picture [H, W, 3] in 0..1; attributes that cannot be seen are ""."""
    seen = look(image)
    return Scene(seen.shape, seen.colour, seen.size, nearest_place(seen.centre), seen.ground)


def look(image: np.ndarray) -> Sight:
    """What one picture [H, W, 3] in 0..1 shows, with the centre as measured."""
    height, width = image.shape[:2]
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    ground = _nearest(np.median(border, axis=0), GROUNDS)

    # the ground of each row: it is shaded from top to bottom, so take the rows' own side pixels
    sides = np.concatenate([image[:, :2], image[:, -2:]], axis=1)
    rows = np.arange(height)
    ground_rows = np.stack(
        [np.polyval(np.polyfit(rows, np.median(sides[..., c], axis=1), 1), rows) for c in range(3)], -1
    )
    distance = np.linalg.norm(image - ground_rows[:, None], axis=-1)  # [H, W]
    mask = distance > _MIN_CONTRAST
    if mask.sum() < 6:
        return Sight(ground)
    mask = _biggest_part(mask)
    strong = mask & (distance >= 0.75 * np.quantile(distance[mask], 0.9))
    rgb = np.median(image[strong], axis=0)
    colour = _nearest(rgb, COLOURS)

    # soft cover: how far each pixel lies on the way from the ground to the shape's colour
    toward = rgb - ground_rows[:, None]  # [H, 1, 3]
    near = np.zeros_like(mask)
    near[1:-1, 1:-1] = True
    grown = mask.copy()
    grown[1:] |= mask[:-1]
    grown[:-1] |= mask[1:]
    grown[:, 1:] |= mask[:, :-1]
    grown[:, :-1] |= mask[:, 1:]
    cover = ((image - ground_rows[:, None]) * toward).sum(-1) / np.maximum((toward**2).sum(-1), 1e-6)
    cover = np.where(grown, np.clip(cover, 0.0, 1.0), 0.0)
    cover = np.where(cover > 0.85, 1.0, cover)  # shading inside the shape is not partial cover
    shape, radius, down, across = _fit(cover)

    size = min(SIZES, key=lambda name: abs(np.log(radius / min(height, width) / SIZES[name])))
    return Sight(ground, shape, colour, size, (down / height, across / width))
