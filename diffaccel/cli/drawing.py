"""The demo's two drawings, with Pillow alone: a grid of pictures and a strip of steps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

INK, FAINT, PAPER = "#1c1c1c", "#6b6b6b", "#ffffff"
COMPUTED, CACHED = "#2461c2", "#f5b83d"  # apart in hue and in lightness, so also without colour vision
_MARGIN, _GAP, _LABEL_WIDTH = 16, 8, 150
_CELL = 128  # pictures are enlarged to at least this width
_TEXT, _LINE = 13, 17


def picture_grid(rows: Sequence[Sequence[Image]], labels: Sequence[Sequence[str]], headings: Sequence[str]) -> Image:
    """One row per run and one column per prompt.

    rows: pictures of one size. labels: lines of text beside each row, the first one darker. headings: one per
    column, wrapped to its width.
    """
    from PIL import Image as PIL_Image
    from PIL import ImageDraw

    width, height = rows[0][0].size
    scale = max(1, -(-_CELL // width))
    width, height = width * scale, height * scale
    wrapped = [textwrap.wrap(heading, max(8, width // 7)) for heading in headings]
    top = _MARGIN + _LINE * max(len(lines) for lines in wrapped) + _GAP
    size = (
        _MARGIN + _LABEL_WIDTH + len(headings) * (width + _GAP) - _GAP + _MARGIN,
        top + len(rows) * (height + _GAP) - _GAP + _MARGIN,
    )
    canvas = PIL_Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(canvas)
    for column, lines in enumerate(wrapped):
        _write(draw, (_MARGIN + _LABEL_WIDTH + column * (width + _GAP), _MARGIN), lines, FAINT)
    for row, (pictures, label) in enumerate(zip(rows, labels, strict=True)):
        y = top + row * (height + _GAP)
        _write(draw, (_MARGIN, y), label[:1], INK)
        _write(draw, (_MARGIN, y + _LINE), label[1:], FAINT)
        for column, picture in enumerate(pictures):
            enlarged = picture.convert("RGB").resize((width, height), PIL_Image.Resampling.BICUBIC)
            canvas.paste(enlarged, (_MARGIN + _LABEL_WIDTH + column * (width + _GAP), y))
    return canvas


def step_strip(rows: Sequence[Sequence[bool]], labels: Sequence[str]) -> Image:
    """One row per run and one cell per step, coloured by whether it was computed or taken from the cache."""
    from PIL import Image as PIL_Image
    from PIL import ImageDraw

    cell, tall, steps = 20, 24, max(len(row) for row in rows)
    left, right = _MARGIN + _LABEL_WIDTH, 130
    top = _MARGIN + _LINE + 4
    bottom = top + len(rows) * (tall + 6)
    size = (max(left + steps * cell + right, left + 320), bottom + _GAP + _LINE + _MARGIN)
    canvas = PIL_Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(canvas)
    _write(draw, (_MARGIN, _MARGIN), ["step"], FAINT)
    for step in range(0, steps, 5 if steps > 12 else 1):
        _write(draw, (left + step * cell, _MARGIN), [str(step + 1)], FAINT)
    for row, (computed, label) in enumerate(zip(rows, labels, strict=True)):
        y = top + row * (tall + 6)
        _write(draw, (_MARGIN, y + 4), [label], INK)
        for step, is_computed in enumerate(computed):
            _box(draw, left + step * cell, y, cell - 2, tall, is_computed)
        count = f"{sum(computed)} of {len(computed)} computed"
        _write(draw, (left + len(computed) * cell + _GAP, y + 4), [count], FAINT)
    for x, is_computed, word in ((left, True, "computed"), (left + 120, False, "taken from the cache")):
        _box(draw, x, bottom + _GAP, cell - 2, _LINE - 2, is_computed)
        _write(draw, (x + cell + 4, bottom + _GAP), [word], INK)
    return canvas


def bars(rows: Sequence[tuple[str, float]], title: str) -> Image:
    """One bar per row, its number beside it."""
    from PIL import Image as PIL_Image
    from PIL import ImageDraw

    left, long, tall = _MARGIN + _LABEL_WIDTH, 360, 20
    canvas = PIL_Image.new("RGB", (left + long + 90, 2 * _MARGIN + (len(rows) + 1) * (tall + _GAP)), PAPER)
    draw = ImageDraw.Draw(canvas)
    _write(draw, (_MARGIN, _MARGIN), [title], INK)
    most = max(value for _, value in rows)
    for number, (label, value) in enumerate(rows, start=1):
        y = _MARGIN + number * (tall + _GAP)
        _write(draw, (_MARGIN, y + 2), [label], FAINT)
        wide = max(1, round(long * value / most))
        draw.rectangle((left, y, left + wide - 1, y + tall - 1), fill=COMPUTED)
        _write(draw, (left + wide + _GAP, y + 2), [f"{value:.3g}"], INK)
    return canvas


def falls(rows: Sequence[tuple[str, float]], title: str) -> Image:
    """A waterfall: what of the row above is left is dark, what went away light; its number beside it."""
    from PIL import Image as PIL_Image
    from PIL import ImageDraw

    left, long, tall = _MARGIN + _LABEL_WIDTH, 420, 20
    canvas = PIL_Image.new("RGB", (left + long + 110, 2 * _MARGIN + (len(rows) + 1) * (tall + _GAP)), PAPER)
    draw = ImageDraw.Draw(canvas)
    _write(draw, (_MARGIN, _MARGIN), [title], INK)
    most = max(value for _, value in rows)
    above = rows[0][1]
    for number, (label, value) in enumerate(rows, start=1):
        y = _MARGIN + number * (tall + _GAP)
        _write(draw, (_MARGIN, y + 2), [label], FAINT)
        ends = [left + max(1, round(long * part / most)) for part in (min(above, value), max(above, value))]
        draw.rectangle((left, y, ends[1] - 1, y + tall - 1), fill=CACHED)
        draw.rectangle((left, y, ends[0] - 1, y + tall - 1), fill=COMPUTED)
        count = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
        told = count if number == 1 or value == above else f"{count}  {above / value:.2f}x"
        _write(draw, (left + long + _GAP, y + 2), [told], INK)
        above = value
    return canvas


def _box(draw: ImageDraw, x: int, y: int, width: int, height: int, is_computed: bool) -> None:
    draw.rectangle((x, y, x + width - 1, y + height - 1), fill=COMPUTED if is_computed else CACHED)


def _write(draw: ImageDraw, corner: tuple[int, int], lines: Sequence[str], colour: str) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(size=_TEXT)  # ships with Pillow
    for number, line in enumerate(lines):
        draw.text((corner[0], corner[1] + number * _LINE), line, fill=colour, font=font)
