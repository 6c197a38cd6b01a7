"""Lines of the table of a measurement, as words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HEAD = ("plan", "computed", "latency", "speed", "pictures/s", "PSNR", "MS-SSIM", "colour", "score")


def row(one: Mapping[str, Any]) -> tuple[str, ...]:
    """The line of a contender in the table."""
    if one["refused"]:
        return (one["name"], "refused", *[""] * (len(HEAD) - 2))
    computed, quality, speed = one["computed"], one["quality"], one["speed"]
    return (
        one["name"],
        f"{computed['steps']:.3g}/{computed['of']}",
        f"{one['latency_s']['median']:.3g} s",
        "1" if one["baseline"] else with_interval(speed["median"], speed["interval"], "{:.2f}"),
        f"{one['throughput']['pictures_per_s']:.3g}",
        *(("reference", "", "") if one["baseline"] else fidelity(quality)),
        _of(quality, "score", "{:.2f}"),
    )


def floor_row(bucket: Mapping[str, Any]) -> tuple[str, ...]:
    """The noise floor as the last line of the table."""
    quality = bucket["floor"].get("quality", {})
    shown = fidelity(quality) if quality else ("not taken", "", "")
    return ("(noise floor)", *[""] * 4, *shown, "")


def fidelity(quality: Mapping[str, Any]) -> tuple[str, str, str]:
    """PSNR, MS-SSIM and colour shift with their intervals."""
    return (
        _of(quality, "psnr", "{:.1f}", " dB"),
        _of(quality, "ms_ssim", "{:.4f}"),
        _of(quality, "colour_shift", "{:.2f}"),
    )


def with_interval(mean: float, ends: Sequence[float], form: str, unit: str = "") -> str:
    """ "1.52 [1.48, 1.57]"; without ends the mean alone."""
    inside = f" [{form.format(ends[0])}, {form.format(ends[1])}]" if ends and None not in ends else ""
    return form.format(mean) + inside + unit


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(padded).rstrip()


def _of(quality: Mapping[str, Any], metric: str, form: str, unit: str = "") -> str:
    found = quality.get(metric)
    if found is None:
        return "-"
    if found["mean"] is None:
        return "identical" if found.get("identical") else "no number"
    return with_interval(found["mean"], found["interval"], form, unit)


def lead_rows(bucket: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Who is nearer to the plain pictures than whom."""
    return [
        (f"{one['of']} over {one['over']}", with_interval(one["psnr_db"], one["interval"], "{:+.1f}", " dB"))
        for one in bucket.get("leads", ())
    ]


def remarks(bucket: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must not miss: broken pictures, runs that do not repeat, time before the first usual run."""
    for one in bucket["contenders"]:
        if one["refused"]:
            continue
        broken = [f"prompt {number + 1}: {fault}" for number, fault in enumerate(one["faults"]) if fault]
        if broken:
            yield f"  {one['name']}: broken pictures: {', '.join(broken[:5])}"
        if not one["repeatable"]:
            yield f"  {one['name']}: two runs of one seed gave different pictures"
        if one["start"]["attach_s"] or one["start"]["beyond_usual_s"] > one["latency_s"]["median"]:
            once, more = one["start"]["attach_s"], one["start"]["beyond_usual_s"]
            yield f"  {one['name']}: once {once:.3g} s to put on, and {more:.3g} s more in the first run"
