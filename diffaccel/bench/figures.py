"""From tallies to figures: plain data, ready for JSON."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from ..core.report import RunReport
from ..quality.bootstrap import Interval, bootstrap
from ..quality.judgement import Judgement, judge
from . import hits
from .request import Request
from .tally import Tally
from .turns import ratios

DIGITS = 6


def figures(asked: Request, tally: Tally, baseline: Tally, judged: Judgement | None) -> dict[str, Any]:
    """One contender beside the baseline of the same size; only what was asked for and why not, where it failed."""
    head = {"name": tally.contender.name, "asked": tally.contender.to_dict(), "refused": tally.refusal}
    if tally.refusal is not None:
        return head
    reports = reports_of(tally)
    plan = None if tally.shown is None or tally.shown.plan is None else tally.shown.plan
    return {
        **head,
        "baseline": tally is baseline,
        "start": _start(tally),
        "latency_s": _seconds(tally.rounds),
        "speed": _speed(baseline.rounds, tally.rounds, asked.level),
        "throughput": _throughput(asked, tally, baseline),
        "stages_s": {name: round(value, DIGITS) for name, value in hits.stages(reports).items()},
        "steps_s": [round(value, DIGITS) for value in hits.step_seconds(reports)],
        "computed": _computed(reports),
        "hits": hits.shares(reports),
        "memory": _memory(tally, reports),
        "quality": {} if judged is None else judged.summary(),
        "faults": [] if judged is None else list(judged.faults),
        "repeatable": tally.same,
        "notes": sorted({note for report in reports for note in report.notes}),
        "plan": None if plan is None else plan.to_dict(),
    }


def judgement(asked: Request, tally: Tally, baseline: Tally) -> Judgement:
    """Pictures against the baseline's; of the baseline itself only faults and scores are worth telling."""
    pictures = tally.pictures()
    return judge(baseline.pictures(), pictures, prompts=asked.prompts, score=asked.score, level=asked.level)


def leads(judged: Mapping[str, Judgement]) -> list[dict[str, Any]]:
    """Of every two contenders what the first is nearer to the plain pictures, in dB, paired by prompt."""
    out = []
    for one, other in itertools.combinations(judged, 2):
        found = judged[one].lead(judged[other], "psnr")
        out.append({"of": one, "over": other, "psnr_db": round(found.mean, 3), "interval": found.to_list(3)})
    return out


def reports_of(tally: Tally) -> list[RunReport]:
    """The reports of all prompts, or of the watched run where the contender has no plan."""
    if tally.watched is not None:
        return [] if tally.watched.report is None else [tally.watched.report]
    return [lap.report for lap in tally.laps.values() if lap.report is not None]


def interval(found: Interval) -> dict[str, Any]:
    """An interval as plain data."""
    return {"median": round(found.mean, DIGITS), "interval": found.to_list(DIGITS), "level": found.level}


def _start(tally: Tally) -> dict[str, Any]:
    """What comes before the first usual run: putting the plan on, warming up, compiling."""
    first = 0.0 if tally.first is None else tally.first.seconds
    usual = median(second for pair in tally.rounds for second in pair)
    return {
        "attach_s": round(tally.attach_s, DIGITS),
        "first_run_s": round(first, DIGITS),
        "beyond_usual_s": round(max(0.0, first - usual), DIGITS),
    }


def _seconds(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    flat = [second for pair in rounds for second in pair]
    low, high = np.quantile(flat, [0.1, 0.9])
    return {
        "median": round(median(flat), DIGITS),
        "p10": round(float(low), DIGITS),
        "p90": round(float(high), DIGITS),
        "each": [[round(second, DIGITS) for second in pair] for pair in rounds],
    }


def _speed(theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]], level: float) -> dict[str, Any]:
    each = ratios(theirs, ours)
    return {**interval(bootstrap(each, level, statistic=np.median)), "each": [round(value, DIGITS) for value in each]}


def _throughput(asked: Request, tally: Tally, baseline: Tally) -> dict[str, Any]:
    rounds, theirs = (tally.batches, baseline.batches) if tally.batches else (tally.rounds, baseline.rounds)
    batch = asked.batch if tally.batches else 1
    per_call = median(second for pair in rounds for second in pair)
    speed = _speed(theirs, rounds, asked.level)
    return {"batch": batch, "pictures_per_s": round(batch / per_call, DIGITS), "speed": speed}


def _computed(reports: Sequence[RunReport]) -> dict[str, Any]:
    calls = [len(report.steps) for report in reports]
    return {
        "steps": round(hits.mean_computed(reports), 3),
        "of": len({step.index for report in reports for step in report.steps}),
        "calls": max(calls, default=0),
        "hit_rate": round(sum(report.hit_rate for report in reports) / max(1, len(reports)), 4),
        "each": [round(hits.computed_steps(report), 3) for report in reports],
    }


def _memory(tally: Tally, reports: Sequence[RunReport]) -> dict[str, Any]:
    laps = [lap for lap in (tally.first, *tally.laps.values()) if lap is not None]
    peaks = [lap.peak_bytes for lap in laps if lap.peak_bytes is not None]
    return {
        "peak_bytes": max(peaks, default=None),
        "weights_bytes": tally.weights_bytes,
        "cache_bytes": max((report.cache_bytes_peak for report in reports), default=0),
    }
