"""What a run did, as numbers by name, and as text in the OpenMetrics format that monitoring reads.

Nothing is measured here: all is in the report already, and a run of which nobody asks costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import RunReport

Labels = tuple[tuple[str, str], ...]
Number = int | float

HELP = {
    "stage_seconds": "Seconds of a stage in the last run.",
    "call_seconds": "Median seconds of a denoiser call in the last run, by whether it was computed.",
    "peak_memory_bytes": "Peak of the device's memory (of the process, on a CPU) in the last run.",
    "cache_peak_bytes": "Most bytes that caches held in the last run.",
    "cache_held_bytes": "Bytes that caches hold after the last run.",
    "hit_ratio": "Reused denoiser calls / all, in the last run.",
    "completed": "1 where the last run came to its end, 0 where it raised or was stopped.",
    "runs": "Runs so far.",
    "failed_runs": "Runs so far that did not come to their end.",
    "denoiser_calls": "Denoiser calls so far, by whether they were computed.",
    "lever_value": "Numbers that a lever gave for the last run, by name.",
}
COUNTERS = ("runs", "failed_runs", "denoiser_calls")


def metrics(report: RunReport) -> dict[str, Number]:
    """The numbers of one run by name, for a log or a dashboard.

    Seconds of stages (`encode_s`, `denoise_s`, `decode_s`, `run_s`) and of denoiser calls (`call_computed_s`,
    `call_reused_s`: medians); `steps`, `calls_computed`, `calls_reused`, `hit_rate`; bytes; `completed` (0 or 1); what
    levers count under `LEVER.NAME`.
    """
    found: dict[str, Number] = {f"{stage}_s": seconds for stage, seconds in report.stages.items()}
    reused = sum(not step.computed for step in report.steps)
    found |= {"run_s": report.seconds, "steps": len({(s.component, s.index) for s in report.steps})}
    found |= {"calls_computed": len(report.steps) - reused, "calls_reused": reused, "hit_rate": report.hit_rate}
    found |= {f"call_{kind}_s": value for kind, value in _call_seconds(report).items()}
    found |= {"peak_memory_bytes": report.peak_memory_bytes, "cache_peak_bytes": report.cache_bytes_peak}
    found |= {"cache_held_bytes": report.cache_bytes_held, "completed": int(report.completed)}
    return found | {f"{lever}.{name}": value for lever, name, value in _lever_values(report)}


def _call_seconds(report: RunReport) -> dict[str, float]:
    kinds = {"computed": True, "reused": False}
    seconds = {kind: [s.seconds for s in report.steps if s.computed is computed] for kind, computed in kinds.items()}
    return {kind: median(values) for kind, values in seconds.items() if values}


def _lever_values(report: RunReport) -> list[tuple[str, str, Number]]:
    """(lever, name, number), numbers one level down by both names."""
    rows: list[tuple[str, str, Number]] = []
    for lever, stats in report.stats.items():
        for name, value in stats.items():
            inner = value.items() if isinstance(value, Mapping) else [("", value)]
            for below, number in inner:
                if isinstance(number, (int, float)) and not isinstance(number, bool):
                    rows.append((lever, f"{name}.{below}" if below else name, number))
    return rows


@dataclass
class Totals:
    """Counts over many runs, for one exporter: `add` a report after each run, give out `openmetrics()`.

    `labels` are put on every line (the pipeline's name, the model).
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    runs: int = 0
    failed_runs: int = 0
    computed: int = 0
    reused: int = 0
    last: RunReport | None = None

    def add(self, report: RunReport) -> None:
        """One more run."""
        reused = sum(not step.computed for step in report.steps)
        self.runs, self.failed_runs = self.runs + 1, self.failed_runs + (not report.completed)
        self.computed, self.reused, self.last = (
            self.computed + len(report.steps) - reused,
            self.reused + reused,
            report,
        )

    def openmetrics(self) -> str:
        """The text that a scrape gets, in the format of OpenMetrics 1.0."""
        rows: dict[str, list[tuple[Labels, Number]]] = {
            "runs": [((), self.runs)],
            "failed_runs": [((), self.failed_runs)],
            "denoiser_calls": [((("kind", "computed"),), self.computed), ((("kind", "reused"),), self.reused)],
        }
        return _text({**rows, **({} if self.last is None else _gauges(self.last))}, self.labels)


def openmetrics(report: RunReport, labels: Mapping[str, str] | None = None) -> str:
    """One run as the text of a scrape (gauges alone; see `Totals` for counts over runs)."""
    return _text(_gauges(report), labels or {})


def _gauges(report: RunReport) -> dict[str, list[tuple[Labels, Number]]]:
    found: dict[str, list[tuple[Labels, Number]]] = {
        "stage_seconds": [((("stage", stage),), seconds) for stage, seconds in report.stages.items()],
        "call_seconds": [((("kind", kind),), value) for kind, value in _call_seconds(report).items()],
        "peak_memory_bytes": [((), report.peak_memory_bytes)],
        "cache_peak_bytes": [((), report.cache_bytes_peak)],
        "cache_held_bytes": [((), report.cache_bytes_held)],
        "hit_ratio": [((), report.hit_rate)],
        "completed": [((), int(report.completed))],
    }
    levers: list[tuple[Labels, Number]] = []
    for lever, name, value in _lever_values(report):
        levers.append(((("lever", lever), ("name", name)), value))
    return {**found, "lever_value": levers} if levers else found


def _text(rows: Mapping[str, list[tuple[Labels, Number]]], labels: Mapping[str, str]) -> str:
    lines: list[str] = []
    for name, values in rows.items():
        family, counter = f"diffaccel_{name}", name in COUNTERS
        lines.append(f"# TYPE {family} {'counter' if counter else 'gauge'}")
        unit = next((unit for unit in ("seconds", "bytes", "ratio") if name.endswith(f"_{unit}")), None)
        lines += [f"# UNIT {family} {unit}"] if unit else []
        lines.append(f"# HELP {family} {HELP[name]}")
        for own, value in values:
            lines.append(f"{family}{'_total' if counter else ''}{_labels((*labels.items(), *own))} {_number(value)}")
    return "\n".join([*lines, "# EOF", ""])


def _number(value: Number) -> str:
    return str(value) if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"


def _labels(pairs: Labels) -> str:
    if not pairs:
        return ""
    escaped = ((k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for k, v in pairs)
    return "{" + ",".join(f'{k}="{v}"' for k, v in escaped) + "}"
