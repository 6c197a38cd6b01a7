"""The drawings hold what they claim: the pictures in their cells, the steps in their colours."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageColor

from diffaccel.cli.drawing import CACHED, COMPUTED, picture_grid, step_strip

COLOURS = [[(200, 0, 0), (0, 200, 0)], [(0, 0, 200), (120, 0, 120)], [(0, 120, 120), (60, 60, 0)]]


def solid(colour, size=(64, 64)):
    return Image.new("RGB", size, colour)


def test_grid_shows_every_picture_enlarged_in_row_and_column():
    rows = [[solid(colour) for colour in row] for row in COLOURS]
    grid = picture_grid(rows, [["plain", "1.00 s", "reference"]] * 3, ["a short prompt", "another " * 8])
    corners = [[corner(grid, colour) for colour in row] for row in COLOURS]
    assert [count(grid, colour) for row in COLOURS for colour in row] == [128 * 128] * 6
    for left, right in corners:
        assert left[0] == right[0] and left[1] < right[1]
    assert [row[0][0] for row in corners] == sorted({row[0][0] for row in corners})


def test_grid_takes_pictures_that_are_not_square_and_large_ones_as_they_are():
    grid = picture_grid([[solid((200, 0, 0), (200, 80))]], [["plain"]], ["a prompt"])
    assert count(grid, (200, 0, 0)) == 200 * 80


def test_labels_are_drawn():
    blank = picture_grid([[solid((255, 255, 255))]], [[""]], [""])
    written = picture_grid([[solid((255, 255, 255))]], [["plain", "1.00 s"]], [""])
    assert count(blank, (255, 255, 255)) == blank.width * blank.height
    assert 50 < count(written, (255, 255, 255)) < written.width * written.height


@pytest.mark.parametrize("steps", [1, 8, 28, 50])
def test_strip_has_one_cell_per_step(steps):
    every = [True] * steps
    alternate = [step % 3 == 0 for step in range(steps)]
    before = cells(step_strip([every], ["plain"]))
    after = cells(step_strip([every, alternate], ["plain", "fast"]))
    legend = 18 * 15
    assert before == (steps * 18 * 24 + legend, legend)
    assert after[0] - before[0] == sum(alternate) * 18 * 24
    assert after[1] - before[1] == (steps - sum(alternate)) * 18 * 24


def cells(strip):
    """(computed, cached) pixels."""
    return count(strip, ImageColor.getrgb(COMPUTED)), count(strip, ImageColor.getrgb(CACHED))


def mask(image, colour):
    return (np.asarray(image) == colour).all(axis=-1)


def count(image, colour):
    return int(mask(image, colour).sum())


def corner(image, colour):
    """(row, column) of the first pixel of this colour."""
    return tuple(np.argwhere(mask(image, colour))[0])
