"""What the tests of the lever share."""

from __future__ import annotations

from typing import Any

from diffaccel import accelerate

FREE = {"first_steps": 1, "last_steps": 0, "min_steps": 0}  # no guard in the way


def reuse(pipe: Any, **options: Any) -> Any:
    """Put the lever on, by default with nothing in the way of its interval."""
    wishes = {f"guidance_{name}": value for name, value in (FREE | options).items()}
    return accelerate(pipe, preset=None, guidance="reuse", **wishes)


def strips(pipe: Any) -> dict[str, str]:
    """One line for each branch of the last run: C computed, . answered."""
    found: dict[str, str] = pipe.acceleration.report.strip()
    return found


def done(pipe: Any) -> tuple[int, int, int]:
    """How many steps of the last run computed both branches, reused the difference, had no guidance."""
    stats = pipe.acceleration.report.stats["guidance.reuse"]
    return stats["steps_both"], stats["steps_reuse"], stats["steps_off"]


def stood_down(pipe: Any) -> str:
    """Why the lever stood down in the last run (empty: it did not)."""
    notes = [note for note in pipe.acceleration.report.notes if note.startswith("guidance.reuse stood down")]
    return "; ".join(notes)
