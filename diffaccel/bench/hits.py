"""What reports say of steps: which were computed, by step and guidance branch, and how long each took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from ..core.report import RunReport


def shares(reports: Sequence[RunReport]) -> dict[str, list[float]]:
    """Per branch and step the share of runs in which it was computed; a step that a run did not call counts as left
    out. Empty without reports."""
    table: dict[str, dict[int, list[bool]]] = {}
    for report in reports:
        for step in report.steps:
            table.setdefault(step.branch, {}).setdefault(step.index, []).append(step.computed)
    total = 1 + max((index for rows in table.values() for index in rows), default=-1)
    count = max(1, len(reports))
    return {
        branch: [round(sum(rows.get(index, ())) / count, 4) for index in range(total)]
        for branch, rows in table.items()
    }


def computed_steps(report: RunReport) -> float:
    """Steps in which the denoiser ran, in the mean over guidance branches."""
    branches = {step.branch for step in report.steps}
    return sum(step.computed for step in report.steps) / max(1, len(branches))


def step_seconds(reports: Sequence[RunReport]) -> list[float]:
    """Per step the median over runs of the denoiser's seconds in it, all branches together."""
    table: dict[int, list[float]] = {}
    for report in reports:
        sums: dict[int, float] = {}
        for step in report.steps:
            sums[step.index] = sums.get(step.index, 0.0) + step.seconds
        for index, seconds in sums.items():
            table.setdefault(index, []).append(seconds)
    return [median(table[index]) for index in sorted(table)]


def stages(reports: Sequence[RunReport]) -> dict[str, float]:
    """Per stage the median seconds over runs."""
    names = reports[0].stages if reports else {}
    return {name: median(report.stages.get(name, 0.0) for report in reports) for name in names}


def mean_computed(reports: Sequence[RunReport]) -> float:
    """Computed steps in the mean over runs."""
    return fmean(computed_steps(report) for report in reports) if reports else 0.0
