"""What a sweep found: points of speed and fidelity, which of them are worth choosing, as CSV, PNG, SVG and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..quality.bootstrap import bootstrap
from . import chart
from .against import decibels
from .pareto import pareto
from .result import Result
from .rows import HEAD, align, floor_row, with_interval

AXES = {"speed": "times as fast as plain", "computed": "share of steps left out"}
_COLUMNS = (
    "name", "series", "value", "pareto", "computed_steps", "steps", "seconds", "speed", "speed_low", "speed_high",
    "psnr_db", "psnr_low", "psnr_high", "psnr_worst", "ms_ssim", "score", "hits",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One setting. `series`: the parameter, or what it competes with. `psnr_db`: mean over prompts, identical pictures
    at 100. `hits`: per guidance branch the share of prompts in which each step was computed."""

    name: str
    series: str
    value: Any
    computed_steps: float
    steps: int
    seconds: float
    speed: float
    speed_interval: Sequence[float]
    psnr_db: float
    psnr_interval: Sequence[float]
    psnr_worst: float
    ms_ssim: float | None
    score: float | None
    hits: Mapping[str, Sequence[float]]

    def gain(self, axis: str, whole: int) -> float:
        """Where it stands on an axis: its speed, or the share of the plain run's steps that it leaves out."""
        return self.speed if axis == "speed" else 1 - self.computed_steps / max(1, whole)


@dataclass(frozen=True)
class Curve:
    """`points` without the plain pipeline, in the order of the sweep; `axis` is a key of AXES."""

    parameter: str
    points: tuple[Point, ...]
    result: Result = field(repr=False)
    axis: str = "speed"
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> int:
        """Steps of the plain run."""
        plain = next(one for one in self.result.document["buckets"][0]["contenders"] if one.get("baseline"))
        return int(plain["computed"]["of"])

    @property
    def front(self) -> tuple[Point, ...]:
        """The points that no other equals or beats in both, fastest first."""
        return tuple(self.points[i] for i in self._front())

    @property
    def floor(self) -> str:
        """PSNR of two plain runs that differ in rounding alone, in words."""
        return floor_row(self.result.document["buckets"][0])[HEAD.index("PSNR")]

    def _front(self) -> list[int]:
        return pareto([(point.gain(self.axis, self.whole), point.psnr_db) for point in self.points])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the whole measurement behind it."""
        best = {point.name for point in self.front}
        points = [{**asdict(point), "pareto": point.name in best} for point in self.points]
        return {
            "parameter": self.parameter,
            "axis": self.axis,
            "points": points,
            "refused": dict(self.refused),
            "bench": self.result.to_dict(),
        }

    def csv(self) -> str:
        """One line per point; hits as one digit in tenths per step and branch."""
        best, out = {point.name for point in self.front}, io.StringIO()
        writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for one in self.points:
            told: dict[str, Any] = {name: getattr(one, name, None) for name in _COLUMNS}
            told |= dict(zip(("speed_low", "speed_high"), one.speed_interval, strict=False))
            told |= dict(zip(("psnr_low", "psnr_high"), one.psnr_interval, strict=False))
            hits = " ".join(f"{branch}:{_digits(row)}" for branch, row in one.hits.items())
            writer.writerow({**told, "pareto": int(one.name in best), "hits": hits})
        return out.getvalue()

    def shapes(self) -> list[chart.Shape]:
        """The chart: gain to the right, PSNR upwards, a line through the points worth choosing."""
        dots = [
            chart.Dot(point.gain(self.axis, self.whole), point.psnr_db, str(point.value), point.series, *ends)
            for point in self.points
            for ends in [point.psnr_interval or (None, None)]
        ]
        title = f"{self.result.document['pipeline']}: {self.parameter}; noise floor {self.floor}"
        return chart.layout(dots, self._front(), title, AXES[self.axis], "PSNR to the plain run, dB")

    def save(self, folder: str | Path) -> dict[str, str]:
        """Write sweep.json, sweep.csv, sweep.png and sweep.html into a folder; {what: path}."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        files = {what: place / f"sweep.{what}" for what in ("json", "csv", "png", "html")}
        files["json"].write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        files["csv"].write_text(self.csv(), encoding="utf-8")
        chart.picture(self.shapes()).save(files["png"])
        drawn = chart.svg(self.shapes())
        files["html"].write_text(self.result.page().replace("</h1>", f"</h1>{drawn}", 1), encoding="utf-8")
        return {what: str(path) for what, path in files.items()}

    def __str__(self) -> str:
        best = {point.name for point in self.front}
        rows = [("", "computed", "speed", "PSNR", "MS-SSIM", "hits")]
        for one in self.points:
            rows.append(
                (
                    ("* " if one.name in best else "  ") + one.name,
                    f"{one.computed_steps:.3g}/{self.whole}",
                    with_interval(one.speed, one.speed_interval, "{:.2f}"),
                    with_interval(one.psnr_db, one.psnr_interval, "{:.1f}", " dB"),
                    "-" if one.ms_ssim is None else f"{one.ms_ssim:.4f}",
                    " ".join(_digits(row) for row in one.hits.values()),
                )
            )
        rows.append(("  (noise floor)", "", "", self.floor, "", ""))
        head = f"{self.parameter} on {self.result.document['pipeline']} (* none is better in {self.axis} and PSNR)"
        lines = [head, *align(rows), "  hits: computed share of prompts by step, in tenths (# all)"]
        return "\n".join([*lines, *(f"  {name}: refused: {why}" for name, why in self.refused.items())])

    def _repr_html_(self) -> str:
        return chart.svg(self.shapes())


def points_of(result: Result, series: Mapping[str, tuple[str, Any]]) -> tuple[list[Point], dict[str, str]]:
    """Points of a measurement's first size, and who was refused. `series`: name -> (series, value)."""
    points, refused = [], {}
    for one in result.document["buckets"][0]["contenders"]:
        if one["refused"]:
            refused[one["name"]] = one["refused"]
        elif not one["baseline"]:
            points.append(_point(one, *series[one["name"]]))
    return points, refused


def _point(one: Mapping[str, Any], series: str, value: Any) -> Point:
    quality = one["quality"]
    each = decibels(one)
    psnr = bootstrap(each, one["speed"]["level"])
    return Point(
        name=one["name"],
        series=series,
        value=value,
        computed_steps=one["computed"]["steps"],
        steps=one["computed"]["of"],
        seconds=one["latency_s"]["median"],
        speed=one["speed"]["median"],
        speed_interval=one["speed"]["interval"],
        psnr_db=round(psnr.mean, 4),
        psnr_interval=psnr.to_list(4),
        psnr_worst=min(each),
        ms_ssim=quality.get("ms_ssim", {}).get("mean"),
        score=quality.get("score", {}).get("mean"),
        hits=one["hits"],
    )


def _digits(shares: Sequence[float]) -> str:
    return "".join("#" if share >= 1 else "." if share <= 0 else str(max(1, int(10 * share))) for share in shares)
