"""What a gate, a predictor or a limit may know about the step at hand. Host data only: reading it never waits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import InvalidOptionError, unknown
from ..extrapolation.forecast import COORDINATES


class Ruling(Enum):
    """What the guards say about a step before any gate is asked."""

    FREE = "free"  # the gate decides
    COMPUTE = "compute"  # computed, whatever the gate would say
    REUSE = "reuse"  # reused without a test (a static mask says so)


@dataclass(frozen=True, slots=True)
class Step:
    """One denoiser call of one branch.

    Attributes:
        index: number of the step in this loop, from 0.
        total: number of steps of this loop, None where it is unknown.
        timestep, sigma: the scheduler's, None where it has none.
        group: the process group whose members must decide alike; None for this process alone.
    """

    index: int
    total: int | None = None
    timestep: float | None = None
    sigma: float | None = None
    group: Any = None


def coordinate(step: Step, kind: str) -> float:
    """Where the step lies on the axis `kind` ("step", "timestep" or "sigma") along which a forecast is made."""
    if kind == "step":
        return float(step.index)
    if kind not in COORDINATES:
        raise unknown("coordinate", kind, COORDINATES)
    value = step.timestep if kind == "timestep" else step.sigma
    if value is None:
        raise InvalidOptionError(
            f"coordinate={kind!r} needs a scheduler that gives one, and this one does not: use coordinate='step'"
        )
    return float(value)
