"""What a search found: one setting per budget, its rivals, and estimates for every number of computed steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import InvalidOptionError
from ..quality.bootstrap import bootstrap, paired
from . import preset
from .runs import Trial, text_of
from .skips import Mask, Method


@dataclass(frozen=True)
class Setting:
    """The schedule for one budget. `trial` is on `prompts` prompts; `held_out`: those had no part in the search."""

    mask: Mask
    method: Method
    coordinate: str
    trial: Trial
    rivals: Mapping[str, Trial]  # plain runs with as many evaluations
    left_out: Mapping[str, str]  # rivals that cannot run in this pipeline, and why
    prompts: int
    held_out: bool
    searched: Trial  # on the prompts of the search

    @property
    def computed(self) -> int:
        """How many steps are computed."""
        return sum(self.mask)

    @property
    def winner(self) -> str | None:
        """The rival that beats the schedule in the mean, or None."""
        best = max(self.rivals, key=lambda name: self.rivals[name].mean_db, default=None)
        return best if best is not None and self.rivals[best].mean_db > self.trial.mean_db else None

    def measured(self) -> dict[str, Any]:
        """The setting's own figures."""
        figures = figures_of(self.trial)
        return {"computed_steps": self.computed, "steps": len(self.mask), **figures, **self._on()}

    def against(self) -> dict[str, dict[str, Any]]:
        """Per rival its figures, and what the schedule is better by, prompt by prompt."""
        out = {}
        for name, trial in self.rivals.items():
            lead = paired(self.trial.psnr_db, trial.psnr_db)
            out[name] = {
                **figures_of(trial),
                "lead_db": round(lead.mean, 2),
                "lead_interval_db": lead.to_list(),
                "lead_sure": lead.excludes_zero,
            }
        return out

    def _on(self) -> dict[str, Any]:
        return {"prompts": self.prompts, "held_out": self.held_out}


@dataclass(frozen=True)
class Point:
    """The best schedule known for so many computed steps, and its mean PSNR as the surrogate has it."""

    mask: Mask
    method: Method
    estimate_db: float


@dataclass(frozen=True)
class Tuned:
    """The result of `tune.search`."""

    settings: tuple[Setting, ...]
    curve: tuple[Point, ...]
    family: str
    pipeline: str
    origin: Mapping[str, Any]
    missed_db: float  # root mean square of what the surrogate missed of a single picture's PSNR
    complete: bool
    calibration: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, computed: int | None = None) -> Setting:
        """The setting with so many computed steps; the first one asked for unless told."""
        for setting in self.settings:
            if computed in (None, setting.computed):
                return setting
        known = ", ".join(str(setting.computed) for setting in self.settings) or "none"
        raise InvalidOptionError(f"computed={computed} was not searched: there are {known}")

    def preset(self, computed: int | None = None) -> str:
        """The text of a preset: give it to a file, and that to `accelerate`."""
        return preset.text(self, self.setting(computed))

    def save(self, folder: str | Path) -> list[Path]:
        """Write one preset per budget into a folder; their paths."""
        place, out = Path(folder), []
        place.mkdir(parents=True, exist_ok=True)
        for setting in self.settings:
            path = place / f"tuned-{self.family}-{setting.computed}-of-{len(setting.mask)}.toml"
            path.write_text(self.preset(setting.computed), encoding="utf-8")
            out.append(path)
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "pipeline": self.pipeline,
            "family": self.family,
            "complete": self.complete,
            "settings": [
                {
                    "steps": text_of(s.mask),
                    "order": s.method.order,
                    "correct": s.method.correct,
                    "coordinate": s.coordinate,
                    "measured": s.measured(),
                    "psnr_each_db": [round(value, 3) for value in s.trial.psnr_db],
                    "rivals": s.against(),
                    "rivals_left_out": dict(s.left_out),
                    "winner": s.winner,
                }
                for s in self.settings
            ],
            "curve": preset.rows(self.curve),
            "missed_db": round(self.missed_db, 2),
            "calibration": dict(self.calibration),
            "origin": dict(self.origin),
        }

    def __str__(self) -> str:
        lines = [f"tuned {self.pipeline}" + ("" if self.complete else " (not complete)")]
        lines += [f"  {preset.sentence(setting)}" for setting in self.settings]
        return "\n".join(lines)


def figures_of(trial: Trial) -> dict[str, Any]:
    """Mean PSNR with its interval, lowest and SSIM."""
    interval = bootstrap(trial.psnr_db)
    out: dict[str, Any] = {
        "psnr_db": round(interval.mean, 2),
        "psnr_interval_db": interval.to_list(),
        "psnr_lowest_db": round(min(trial.psnr_db), 2),
    }
    return {**out, "ssim": round(fmean(trial.ssim), 5)} if trial.ssim else out
