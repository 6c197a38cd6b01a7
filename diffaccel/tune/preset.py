"""A search's result as the text of a preset, with everything that was measured beside the wishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..planner import toml
from .runs import text_of, wishes_of

if TYPE_CHECKING:
    from .outcome import Point, Setting, Tuned

NAMES = {"own": "the pipeline's own scheduler", "euler": "Euler", "unipc": "UniPC"}


def text(tuned: Tuned, setting: Setting) -> str:
    """The preset of one budget."""
    head = {"description": sentence(setting), "families": [tuned.family]}
    tables: dict[str, Mapping[str, Any]] = {
        "wishes": wishes_of(setting.mask, setting.method, setting.coordinate),
        "measured": setting.measured(),
        **({"instead": instead(setting)} if setting.winner else {}),
        "rivals": {**setting.against(), **({"left_out": dict(setting.left_out)} if setting.left_out else {})},
        "calibration": tuned.calibration,
        "origin": {**tuned.origin, "complete": tuned.complete},
    }
    told = "# Written by `diffaccel tune`: found on one pipeline, number of steps and noise schedule, and for those.\n"
    parts = [f"\n[{name}]\n{toml.dumps(table)}" for name, table in tables.items() if table]
    return told + toml.dumps(head) + "".join(parts) + toml.dumps({"schedules": rows(tuned.curve)})


def sentence(setting: Setting) -> str:
    """One line: what was measured, and what would be better."""
    measured, winner = setting.measured(), setting.winner
    interval = measured["psnr_interval_db"]
    between = f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else ""
    on = f"{setting.prompts} {'held-out' if setting.held_out else 'searched'} prompt(s)"
    told = (
        f"{setting.computed} of {len(setting.mask)} steps, {setting.method}: {measured['psnr_db']:.1f} dB to the "
        f"plain run{between} on {on}"
    )
    rivals = {name: trial.mean_db for name, trial in setting.rivals.items()}
    if winner is not None:
        return f"{told}; but simply {setting.computed} steps of {NAMES[winner]} have {rivals[winner]:.1f} dB"
    if rivals:
        best = max(rivals, key=rivals.__getitem__)
        return f"{told}; {setting.computed} steps of {NAMES[best]} have {rivals[best]:.1f} dB"
    return told


def instead(setting: Setting) -> dict[str, Any]:
    """The steps and the scheduler that beat the schedule."""
    assert setting.winner is not None
    trial = setting.rivals[setting.winner]
    return {"scheduler": setting.winner, "steps": setting.computed, "psnr_db": round(trial.mean_db, 2)}


def rows(curve: Sequence[Point]) -> list[dict[str, Any]]:
    """The best schedule known for every number of computed steps."""
    return [
        {
            "computed_steps": sum(point.mask),
            "steps": text_of(point.mask),
            "order": point.method.order,
            "correct": point.method.correct,
            "estimate_db": round(point.estimate_db, 1),
        }
        for point in curve
    ]
