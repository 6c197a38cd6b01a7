"""`sweep` on a real pipeline: points, Pareto, files; fewer steps of Euler are always among them."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from diffaccel.bench import Curve, sweep
from diffaccel.bench.chart import COLOURS, Dot, layout, picture, svg, ticks
from diffaccel.bench.pareto import pareto
from diffaccel.errors import InvalidOptionError
from tests import tiny

CALL = {"height": 16, "width": 16, "max_sequence_length": 16, "num_inference_steps": 8}
BASE = "cache=interval,cache_min_steps=0"


@pytest.fixture(scope="module")
def curve() -> Curve:
    clock = itertools.count(0.0, 0.5).__next__
    return sweep(
        tiny.build("flux"), "cache_interval", [2, 4], ["red ring"], base=BASE, rounds=1, axis="computed", floor=0,
        clock=clock, **CALL,
    )  # fmt: skip


def test_points_of_the_parameter_stand_beside_fewer_euler_steps(curve: Curve) -> None:
    told = {point.name: point.computed_steps for point in curve.points}
    ours = {"cache_interval=2": 5, "cache_interval=4": 3}
    assert told == ours | {f"{who},steps={count}": count for who in ("Euler", "abm solver") for count in (3, 5)}
    assert curve.whole == 8 and {point.series for point in curve.points} == {"cache_interval", "Euler", "abm solver"}
    assert [point.hits["cond"] for point in curve.points[:1]] == [[1, 0, 1, 0, 1, 0, 1, 1]]


def test_another_scheduler_competes_by_itself_and_as_euler() -> None:
    call: dict[str, Any] = tiny.call_kwargs("wan", num_inference_steps=4)
    for name in ("prompt", "generator", "output_type"):
        call.pop(name)
    clock = itertools.count(0.0, 0.5).__next__
    pipe = tiny.build("wan")
    scheduler = pipe.scheduler
    found = sweep(pipe, "cache_interval", [2, 3], ["red ring"], base=BASE, rounds=1, floor=0, clock=clock, **call)
    assert {point.series for point in found.points} >= {"cache_interval", "own scheduler", "Euler"}
    assert pipe.scheduler is scheduler and not found.refused


def test_steps_by_themselves_and_under_a_plan() -> None:
    clock, pipe = itertools.count(0.0, 0.5).__next__, tiny.build("flux")
    alone = sweep(pipe, "steps", [2, 4], ["red ring"], rounds=1, floor=0, clock=clock, **CALL)
    assert {point.name: point.computed_steps for point in alone.points} == {"steps=2": 2, "steps=4": 4}
    under = sweep(pipe, "steps", [4, 6], ["red ring"], base=BASE, rounds=1, floor=0, clock=clock, **CALL)
    assert {point.name: point.computed_steps for point in under.points if point.series != "abm solver"} == {
        "steps=4": 3, "steps=6": 4, "Euler,steps=3": 3, "Euler,steps=4": 4,
    }  # fmt: skip


def test_files_hold_every_point(curve: Curve, tmp_path: Path) -> None:
    files = curve.save(tmp_path)
    rows = list(csv.DictReader(io.StringIO(Path(files["csv"]).read_text())))
    assert [row["name"] for row in rows] == [point.name for point in curve.points]
    assert rows[0]["hits"] == "cond:#.#.#.##" and float(rows[0]["psnr_db"]) == curve.points[0].psnr_db
    assert sum(int(row["pareto"]) for row in rows) == len(curve.front)
    told = json.loads(Path(files["json"]).read_text())
    assert len(told["points"]) == 6 and told["bench"]["buckets"]
    with Image.open(files["png"]) as shown:
        colours = {colour for _, colour in shown.getcolors(1 << 16)}
    assert {tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in COLOURS[:3]} <= colours
    page = Path(files["html"]).read_text()
    assert page.count("<circle") == 6 + 3 and "Euler" in str(curve) and "noise floor" in page  # points and the legend


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"values": [2]}, "two or more"),
        ({"axis": "sped"}, "speed"),
        ({"parameter": "cache_intervall"}, "cache_interval"),
        ({"base": None}, "cache_interval"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(given: dict[str, Any], said: str) -> None:
    pipe = tiny.build("flux")
    pipe.transformer.forward = lambda *_, **__: pytest.fail("something ran")
    words: dict[str, Any] = {"parameter": "cache_interval", "values": [2, 3], "prompts": ["a"], "base": BASE, **given}
    with pytest.raises(InvalidOptionError, match=said) as refusal:
        sweep(pipe, **words)
    assert len(str(refusal.value)) <= 300


def test_pareto_keeps_what_nothing_beats() -> None:
    points = [(1.0, 60.0), (2.0, 40.0), (1.5, 39.0), (2.0, 40.0), (3.0, 20.0), (2.5, 45.0)]
    assert [points[i] for i in pareto(points)] == [(3.0, 20.0), (2.5, 45.0), (1.0, 60.0)]
    for i in set(range(6)) - set(pareto(points)):  # by the definition
        assert any(other[0] >= points[i][0] and other[1] >= points[i][1] for j, other in enumerate(points) if j != i)
    assert pareto([]) == []


def test_a_chart_puts_points_where_their_numbers_are() -> None:
    dots = [Dot(1, 30, "a", "ours", 29, 31), Dot(2, 40, "b", "ours"), Dot(2, 30, "<c>", "theirs")]
    shapes = layout(dots, [1], "title", "x", "y")
    discs = [shape for shape in shapes if shape.kind == "dot"][:3]
    assert discs[0].x < discs[1].x == discs[2].x and discs[0].y == discs[2].y > discs[1].y
    assert discs[0].colour == discs[1].colour != discs[2].colour
    assert "&lt;c&gt;" in svg(shapes) and picture(shapes).size == (760, 460)
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1] and ticks(31.2, 58) == [35, 40, 45, 50, 55]
    layout([Dot(1, 1, "", "alone")], [0], "", "", "")  # one point has no span
