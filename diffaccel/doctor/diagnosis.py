"""What the doctor found, as plain data: findings by the name of their fault, trials of levers, and remarks."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import Any

from .faults import FAULTS
from .installation import Environment

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


@dataclass(frozen=True)
class Finding:
    """A fault that was seen: its name in `FAULTS`, where, and the evidence in a clause."""

    fault: str
    where: str
    evidence: str

    @property
    def next_step(self) -> str:
        """What to do."""
        return FAULTS[self.fault].next_step

    def __str__(self) -> str:
        return f"{self.fault}: {self.where}: {self.evidence}"


@dataclass(frozen=True)
class Trial:
    """One lever, tried alone: `status` is "passed", "skipped" (it cannot act here) or "failed"; `note` says why.

    `hit_rate`: reused calls / all calls (None for levers that reuse none).
    """

    lever: str
    status: str
    note: str
    hit_rate: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All of it. `remarks` are what was not looked at, and why, and what is worth knowing without being a fault."""

    environment: Environment
    pipeline: str = ""
    findings: tuple[Finding, ...] = ()
    trials: tuple[Trial, ...] = ()
    remarks: tuple[str, ...] = field(default=())

    @property
    def faults(self) -> tuple[str, ...]:
        """Names of the faults that were found, each once."""
        return tuple(dict.fromkeys(finding.fault for finding in self.findings))

    @property
    def healthy(self) -> bool:
        """Nothing found?"""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        found = [{**asdict(finding), "next_step": finding.next_step} for finding in self.findings]
        return {
            "environment": self.environment.to_dict(),
            "pipeline": self.pipeline,
            "healthy": self.healthy,
            "findings": found,
            "trials": [asdict(trial) for trial in self.trials],
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        lines = [str(self.environment)]
        if self.pipeline:
            lines += ["", f"pipeline: {self.pipeline}"]
            lines += [f"  {trial.lever:<22} {trial.status:<8} {_told(trial)}".rstrip() for trial in self.trials]
        lines += ["", f"{len(self.findings)} fault{'s' * (len(self.findings) != 1)} found"]
        for finding in self.findings:
            lines += [f"  {finding.fault}: {FAULTS[finding.fault].title}", f"    where: {finding.where}"]
            lines += [f"    seen:  {finding.evidence}", f"    next:  {finding.next_step}"]
        return "\n".join(lines + [f"  note: {remark}" for remark in self.remarks])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("fault", "where", "seen", "next"))
        rows = [(f.fault, f.where, f.evidence, f.next_step) for f in self.findings]
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        said = f"{self.pipeline or 'environment'}: {len(rows)} faults found"
        table = f"<table><caption>{html.escape(said)}</caption><tr>{head}</tr>{body}</table>"
        return f"{table}<details><summary>all</summary><pre>{html.escape(str(self))}</pre></details>"


def _told(trial: Trial) -> str:
    rate = "" if trial.hit_rate is None else f"{trial.hit_rate:.0%} reused"
    return "; ".join(part for part in (rate, trial.note) if part)
