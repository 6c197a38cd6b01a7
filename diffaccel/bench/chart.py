"""A chart of points in two dimensions, laid out once as plain shapes and drawn as SVG or as a Pillow picture."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = ("#2461c2", "#d1495b", "#3b8b5a", "#8a5fb0", "#c98a1b", "#5f6b7a")  # by series
INK, FAINT, GRID, PAPER = "#1c1c1c", "#6b6b6b", "#e2e2e2", "#ffffff"
WIDE, TALL, LEFT, TOP, BOTTOM, RIGHT = 760, 460, 64, 46, 52, 170


@dataclass(frozen=True)
class Dot:
    """A point with what is written beside it; `low` and `high` are the ends of its interval in y."""

    x: float
    y: float
    label: str
    series: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Shape:
    """A line ("line": x, y to x2, y2), disc ("dot": radius x2) or text ("text"; `anchor` start, middle, end)."""

    kind: str
    x: float
    y: float
    x2: float = 0.0
    y2: float = 0.0
    colour: str = INK
    text: str = ""
    anchor: str = "start"


def layout(dots: Sequence[Dot], front: Sequence[int], title: str, x_name: str, y_name: str) -> list[Shape]:
    """Axes with round ticks, a line through the dots of the `front`, dots coloured by series, a legend."""
    xs = _span([dot.x for dot in dots])
    ys = _span([end for dot in dots for end in (dot.y, dot.low, dot.high) if end is not None])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDE - LEFT - RIGHT) * (x - xs[0]) / (xs[1] - xs[0]),
            TALL - BOTTOM - (TALL - TOP - BOTTOM) * (y - ys[0]) / (ys[1] - ys[0]),
        )

    shapes = [Shape("text", 6, 16, text=title)]
    shapes += _axes(xs, ys, x_name, y_name)
    line = sorted((dots[i].x, dots[i].y) for i in front)
    for (x, y), (x2, y2) in itertools.pairwise(line):
        shapes.append(Shape("line", *at(x, y), *at(x2, y2), colour=FAINT))
    names = list(dict.fromkeys(dot.series for dot in dots))
    for dot in dots:
        x, y = at(dot.x, dot.y)
        colour = COLOURS[names.index(dot.series) % len(COLOURS)]
        if dot.low is not None and dot.high is not None:
            shapes.append(Shape("line", x, at(dot.x, dot.low)[1], x, at(dot.x, dot.high)[1], colour))
        shapes += [Shape("dot", x, y, 4, colour=colour), Shape("text", x + 7, y - 5, colour=FAINT, text=dot.label)]
    for number, name in enumerate(names):
        y = TOP + 18 * number
        shapes.append(Shape("dot", WIDE - RIGHT + 24, y, 4, colour=COLOURS[number % len(COLOURS)]))
        shapes.append(Shape("text", WIDE - RIGHT + 34, y + 4, text=name))
    return shapes


def svg(shapes: Sequence[Shape]) -> str:
    """The shapes as SVG text."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{TALL}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="{PAPER}"/>{"".join(map(_svg, shapes))}</svg>'
    )


def picture(shapes: Sequence[Shape]) -> Image:
    """The shapes as a Pillow picture."""
    from PIL import Image, ImageDraw, ImageFont

    canvas = Image.new("RGB", (WIDE, TALL), PAPER)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=11)
    for one in shapes:
        if one.kind == "line":
            draw.line((one.x, one.y, one.x2, one.y2), fill=one.colour)
        elif one.kind == "dot":
            draw.ellipse((one.x - one.x2, one.y - one.x2, one.x + one.x2, one.y + one.x2), fill=one.colour)
        else:
            shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[one.anchor] * draw.textlength(one.text, font=font)
            draw.text((one.x - shift, one.y - 10), one.text, fill=one.colour, font=font)
    return canvas


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between two others."""
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(xs: tuple[float, float], ys: tuple[float, float], x_name: str, y_name: str) -> Iterator[Shape]:
    right, bottom = WIDE - RIGHT, TALL - BOTTOM
    for value in ticks(*xs):
        x = LEFT + (right - LEFT) * (value - xs[0]) / (xs[1] - xs[0])
        yield Shape("line", x, TOP, x, bottom, GRID)
        yield Shape("text", x, bottom + 16, colour=FAINT, text=f"{value:g}", anchor="middle")
    for value in ticks(*ys):
        y = bottom - (bottom - TOP) * (value - ys[0]) / (ys[1] - ys[0])
        yield Shape("line", LEFT, y, right, y, GRID)
        yield Shape("text", LEFT - 6, y + 4, colour=FAINT, text=f"{value:g}", anchor="end")
    yield Shape("text", (LEFT + right) / 2, TALL - 14, text=x_name, anchor="middle")
    yield Shape("text", 6, TOP - 8, text=y_name)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest with a little air; something, also where all are equal."""
    low, high = min(values), max(values)
    air = 0.06 * (high - low) or max(0.05 * abs(high), 0.5)
    return low - air, high + air


def _svg(one: Shape) -> str:
    if one.kind == "line":
        return f'<path d="M{one.x:.1f} {one.y:.1f}L{one.x2:.1f} {one.y2:.1f}" stroke="{one.colour}"/>'
    if one.kind == "dot":
        return f'<circle cx="{one.x:.1f}" cy="{one.y:.1f}" r="{one.x2:g}" fill="{one.colour}"/>'
    place = f'x="{one.x:.1f}" y="{one.y:.1f}" fill="{one.colour}" text-anchor="{one.anchor}"'
    return f"<text {place}>{html.escape(one.text)}</text>"
