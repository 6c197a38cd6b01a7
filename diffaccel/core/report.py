"""What one run did: every denoiser call, the three stages, memory, and remarks."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """One denoiser call.

    `index` counts the steps of this run from 0; `timestep` and `sigma` are the scheduler's (None where it has
    none); `branch` is the guidance branch ("cond", "uncond", "cond_uncond" for a batched call, ...);
    `computed` is False where a cache answered; `gate` is the number the gate compared with its threshold
    (None where it did not compare); `seconds` is the time of the call (host clock, or CUDA events).
    `forecast_error` is given for computed steps under a cache: what a reuse would have missed there, as relative
    mean absolute error of what the cache remembers, one number per sample of the batch (the adaptive cache: as
    relative Euclidean error of what the sampler is given, guidance done, had the newest been given again).
    """

    index: int
    timestep: float | None
    sigma: float | None
    branch: str
    computed: bool
    gate: float | None
    seconds: float
    component: str = "transformer"
    forecast_error: tuple[float, ...] | None = None


@dataclass(frozen=True)
class RunReport:
    """The report of one pipeline call (`pipe.acceleration.report`).

    `stages` holds seconds of encode, denoise, decode. `cache_bytes_held` is what caches still hold after the
    run (0 unless something leaks), `cache_bytes_peak` the most they held in it. `completed` is False when the
    run raised, was interrupted by an exception, or stopped by `pipe._interrupt` before its last step.
    """

    steps: list[StepRecord] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    cache_bytes_held: int = 0
    cache_bytes_peak: int = 0
    notes: list[str] = field(default_factory=list)
    stats: dict[str, dict[str, object]] = field(default_factory=dict)
    completed: bool = True

    @property
    def hit_rate(self) -> float:
        """Reused calls / all denoiser calls (0.0 where no call was seen)."""
        return sum(not s.computed for s in self.steps) / len(self.steps) if self.steps else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole pipeline call."""
        return sum(self.stages.values())

    def strip(self) -> dict[str, str]:
        """One line per branch: `C` computed, `.` reused, e.g. {"cond": "CCC.C.CC"}."""
        lines: dict[str, str] = {}
        for step in self.steps:
            lines[step.branch] = lines.get(step.branch, "") + ("C" if step.computed else ".")
        return lines

    def metrics(self) -> dict[str, int | float]:
        """Numbers by name, for a log or a dashboard; see `core.metrics.metrics`."""
        from .metrics import metrics  # whoever asks for none loads none

        return metrics(self)

    def openmetrics(self, labels: Mapping[str, str] | None = None) -> str:
        """The text of a scrape, as OpenMetrics has it; `labels` are put on every line. Over many runs:
        `core.metrics.Totals`."""
        from .metrics import openmetrics

        return openmetrics(self, labels)

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.stages.items())
        lines = [f"run {'completed' if self.completed else 'did not complete'}: {stages}"]
        lines += [f"  {branch:<12} {strip}" for branch, strip in self.strip().items()]
        lines.append(f"  hit rate {self.hit_rate:.0%} of {len(self.steps)} denoiser calls")
        lines.append(f"  cache memory {self.cache_bytes_peak} bytes at most, {self.cache_bytes_held} after the run")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = [
            (
                s.index,
                s.branch,
                "computed" if s.computed else "reused",
                _short(s.gate),
                _short(s.sigma),
                _short(s.seconds),
            )
            for s in self.steps
        ]
        head = "".join(f"<th>{name}</th>" for name in ("step", "branch", "", "gate", "sigma", "seconds"))
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in cells)
        table = f"<details><summary>every call</summary><table><tr>{head}</tr>{rows}</table></details>"
        return f"<pre>{html.escape(str(self))}</pre>{table}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
