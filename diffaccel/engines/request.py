"""What is asked of an engine, and what comes back: a text, and row by row how each item of the plan is said in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ..errors import InvalidOptionError
from ..planner.plan import Plan, PlanItem

SAME, NEAR, NOT = "same", "near", "not"  # the same mechanism and numbers; a similar one; nothing like it


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        model: repository on the hub, or folder.
        height, width, frames, steps, guidance: as the pipeline takes them; None: the engine's default.
        branches: forwards a step (2: classifier-free guidance); heads: of the denoiser's attention (0: not known).
        gpus: over how many one generation is spread.
        serve: a server instead of one generation, where the engine has both.
        weights: transformer weights that somebody quantized for this engine.
    """

    model: str
    prompt: str = "a red ring"
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    guidance: float | None = None
    branches: int = 1
    heads: int = 0
    seed: int = 0
    gpus: int = 1
    serve: bool = False
    weights: str | None = None

    def degrees(self) -> tuple[int, int]:
        """(branches of guidance side by side, sequence parallel degree by Ulysses), together all GPUs."""
        guidance = 2 if self.branches == 2 and self.gpus % 2 == 0 else 1
        ulysses = self.gpus // guidance
        if self.heads and self.heads % ulysses:
            raise InvalidOptionError(
                f"gpus={self.gpus}: Ulysses deals out {self.heads} heads, which {ulysses} does not divide"
            )
        return guidance, ulysses


@dataclass(frozen=True)
class Row:
    """How one item of the plan is said: `how` is "same", "near" or "not"; `why` is what differs."""

    item: str
    how: str
    why: str = ""


@dataclass(frozen=True)
class Export:
    """A command or script for an engine. `sources` say where its arguments were read."""

    engine: str
    version: str
    text: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def cannot(self) -> tuple[Row, ...]:
        """What the engine cannot express."""
        return tuple(row for row in self.rows if row.how == NOT)

    def to_json(self) -> str:
        """One JSON document."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        head = [f"# For {self.engine} ({self.version}); not run by us."]
        words = {SAME: "said", NEAR: "nearly", NOT: "CANNOT SAY"}
        head += [f"# {words[row.how]} {row.item}" + (f": {row.why}" if row.why else "") for row in self.rows]
        head += [f"# note: {note}" for note in self.notes]
        return "\n".join([*head, self.text])


Translator = Callable[[PlanItem], Row]


def rows_of(plan: Plan, table: Mapping[str, Translator], otherwise: str) -> tuple[Row, ...]:
    """A row for each enabled item: by its name, else by its place ("cache"), else `otherwise`."""
    rows = []
    for item in plan.items:
        if item.status == "enabled":
            say = table.get(item.name) or table.get(item.name.partition(".")[0])
            rows.append(say(item) if say is not None else Row(item.name, NOT, otherwise))
    return tuple(rows)


def number(item: PlanItem, name: str, otherwise: float) -> float:
    """A number among an item's parameters; `otherwise` where it is left to the lever."""
    value = item.params.get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise


def has(plan: Plan, *places: str) -> str | None:
    """The first enabled item that stands in one of these places."""
    return next((name for name in plan.enabled if name.partition(".")[0] in places), None)


def positive(name: str, text: str) -> float:
    """The number that an extra was given."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 1000:
        raise InvalidOptionError(f"{name} must be a number above 0, got {text!r}")
    return found


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """The word that an extra was given."""
    if value not in allowed:
        raise InvalidOptionError(f"{name} must be {' or '.join(allowed)}, got {value!r}")
    return value
