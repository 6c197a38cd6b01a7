"""What takes part in a measurement: the plain pipeline, a plan, or the plain pipeline with fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidOptionError, clipped, unknown
from ..planner.plan import Plan
from ..planner.presets import known
from ..tune.rivals import RIVALS

PLAIN = "plain"


@dataclass(frozen=True)
class Contender:
    """One setting: `preset` and `overrides` of `accelerate`, or neither and then perhaps another `scheduler` ("euler",
    "unipc"; "own" is the pipeline's); and perhaps another number of `steps`."""

    name: str
    preset: str | Plan | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    scheduler: str = "own"

    @property
    def accelerated(self) -> bool:
        """Does it have a plan?"""
        return self.preset is not None or bool(self.overrides)

    @property
    def is_baseline(self) -> bool:
        """Is it the pipeline as it is?"""
        return not self.accelerated and self.steps is None and self.scheduler == "own"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what was asked for."""
        preset = self.preset.to_dict() if isinstance(self.preset, Plan) else self.preset
        wish = {"preset": preset, **{name: _plain(value) for name, value in self.overrides.items()}}
        return {**(wish if self.accelerated else {"scheduler": self.scheduler}), "steps": self.steps}


def contenders(plans: object) -> tuple[Contender, ...]:
    """Contenders of `plans`, the plain pipeline in front unless it is among them.

    plans: one or a sequence of wishes, or {name: wish}. A wish is a text (see `parse`), a `Plan`, None (plain), or a
    mapping of overrides of `accelerate` with "preset" or, for plain runs, "steps" and "scheduler" among them.
    Raises InvalidOptionError for anything else, and for two of one name.
    """
    given: Iterable[tuple[str | None, object]]
    if isinstance(plans, Mapping):
        given = [(str(name), wish) for name, wish in plans.items()]
    elif isinstance(plans, str | Plan) or plans is None:
        given = [(None, plans)]
    elif isinstance(plans, Iterable):
        given = [(None, wish) for wish in plans]
    else:
        raise InvalidOptionError(f"plans must be texts, plans or overrides, got {type(plans).__name__}")
    found = [_of(name, wish) for name, wish in given]
    if not any(one.is_baseline for one in found):
        found.insert(0, Contender(PLAIN))
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidOptionError(f"two plans are called {clipped(twice)!r}: give them names, as {{name: plan}}")
    return tuple(found)


def parse(text: str, name: str | None = None) -> Contender:
    """A contender from text: "plain", "plain,steps=14", a preset's name or TOML file, KEY=VALUE of `accelerate`, or a
    preset with some behind it ("auto,level=fast,steps=20"); values as JSON where they are some."""
    head, *rest = [part.strip() for part in text.split(",")]
    words = ([] if "=" not in head else [head]) + rest
    preset = head if "=" not in head and head != PLAIN else None
    if preset is not None and preset != "auto" and not known(preset) and not preset.endswith(".toml"):
        raise InvalidOptionError(
            f"plan {clipped(text)!r}: {clipped(preset)!r} is no preset (`diffaccel presets` lists them); write "
            f"'{PLAIN}', a preset, a .toml file, or KEY=VALUE of accelerate"
        )
    values: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key.isidentifier():
            raise InvalidOptionError(f"plan {clipped(text)!r}: {clipped(word)!r} is not of the form KEY=VALUE")
        values[key] = _value(value)
    return _of(name or text, values | ({} if preset is None else {"preset": preset}))


def _of(name: str | None, wish: object) -> Contender:
    if isinstance(wish, Contender):
        return wish
    if isinstance(wish, str):
        return parse(wish, name)
    if wish is None:
        return Contender(name or PLAIN)
    if isinstance(wish, Plan):
        return Contender(name or wish.preset, wish)
    if not isinstance(wish, Mapping):
        raise InvalidOptionError(f"a plan must be a text, a Plan, overrides or None, got {type(wish).__name__}")
    rest = {str(key): value for key, value in wish.items()}
    preset, steps, scheduler = rest.pop("preset", None), rest.pop("steps", None), rest.pop("scheduler", "own")
    if (preset is not None or rest) and scheduler != "own":
        raise InvalidOptionError(f"scheduler is for plain runs; {clipped(str(name))!r} has a plan too")
    if scheduler not in RIVALS:
        raise unknown("scheduler", str(scheduler), RIVALS)
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InvalidOptionError(f"steps must be a whole number of at least 1, got {clipped(repr(steps))}")
    named = name or ",".join([*([str(preset)] if preset else []), *(f"{k}={v}" for k, v in rest.items())])
    named = named or ",".join([PLAIN, *([f"scheduler={scheduler}"] if scheduler != "own" else [])])
    return Contender(named if steps is None or name else f"{named},steps={steps}", preset, rest, steps, scheduler)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
