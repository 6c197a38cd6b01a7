"""Plan: what is on, what is not, and why. Plain immutable data that round-trips through dict and TOML."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypedDict, TypeVar, cast

from ..core.place import LEVELS
from ..errors import InvalidOptionError, unknown
from . import toml
from .options import Budget

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
STATUSES = ("enabled", "skipped", "refused")


def _frozen(value: object) -> object:
    return tuple(_frozen(entry) for entry in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class PlanItem:
    """One row: `status` is "enabled", "skipped" (nothing to act on) or "refused" (a clash); `reason` says why.

    `params` are the values in force; `predicted` and `measured` carry their `origin` ("computed", "measured" or
    "unmeasured"); `predicted` is empty where the item is off, `measured` None before a run. Its `gain` is the time of
    a generation before over after, on top of the items above. `published` is what the preset quotes of others: `gain`,
    `of` (what was timed), `what` (the pair) and `source`.
    """

    name: str
    slot: str
    status: str
    reason: str
    fidelity: str
    params: Mapping[str, object] = field(default_factory=dict)
    predicted: Mapping[str, object] = field(default_factory=dict)
    measured: Mapping[str, object] | None = None
    published: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise unknown("plan item status", str(self.status), STATUSES)
        # JSON and TOML know one kind of sequence: a plan that was written and read again equals the one before.
        object.__setattr__(self, "params", {key: _frozen(value) for key, value in self.params.items()})


FORM = {
    "preset": toml.TEXT,
    "pipeline": toml.TEXT,
    "family": toml.TEXT,
    "hardware": toml.TEXT,
    "level": toml.TEXT,
    "model": toml.TEXT,
    "items": toml.LIST,
    "budget": toml.TABLE,
    "notes": toml.LIST,
}
ITEM_FORM = {
    **dict.fromkeys(("name", "slot", "status", "reason", "fidelity"), toml.TEXT),
    **dict.fromkeys(("params", "predicted", "measured", "published"), toml.TABLE),
}


class BudgetTable(TypedDict, total=False):
    """A budget as plain data."""

    memory_gib: float | None
    min_psnr_db: float | None
    fidelity: str
    max_seconds: float | None
    max_steps: int | None


class PlanTable(TypedDict, total=False):
    """A plan as plain data."""

    preset: str
    pipeline: str
    family: str
    hardware: str
    level: str | None
    model: str
    items: Sequence[Mapping[str, object]]
    budget: BudgetTable
    notes: Sequence[str]


@dataclass(frozen=True)
class Plan:
    """A decision for one pipeline on one machine. `level` is the dial's, None where no number that is in force comes
    from it. `model`: what it was planned for, where that was not live."""

    preset: str
    pipeline: str
    family: str
    hardware: str
    items: tuple[PlanItem, ...] = ()
    budget: Budget = field(default_factory=Budget)
    notes: tuple[str, ...] = ()
    level: str | None = None
    model: str = ""

    def __post_init__(self) -> None:
        if self.level is not None and self.level not in LEVELS:
            raise unknown("level", self.level, LEVELS)

    def item(self, name: str) -> PlanItem:
        """The item of that name."""
        for item in self.items:
            if item.name == name:
                return item
        raise unknown("plan item", name, [item.name for item in self.items])

    @property
    def enabled(self) -> tuple[str, ...]:
        """Names of the items that are on."""
        return tuple(item.name for item in self.items if item.status == "enabled")

    def with_measured(self, values: Mapping[str, object]) -> Plan:
        """The plan whose enabled items carry what a measurement of all of them together gave."""
        count = len(self.enabled)
        together: dict[str, object] = {"items_together": count} if count > 1 else {}
        items = tuple(
            replace(item, measured={**(item.measured or {}), **values, **together, "origin": "measured"})
            if item.status == "enabled"
            else item
            for item in self.items
        )
        return replace(self, items=items)

    # ---- plain data ------------------------------------------------------------------------------------

    def to_dict(self) -> PlanTable:
        """Plain data, ready for JSON."""
        data = asdict(self)
        data["items"] = [{**item, "params": dict(item["params"])} for item in data["items"]]
        data["notes"] = list(self.notes)
        return cast(PlanTable, data)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Plan:
        """The inverse of `to_dict`. Unknown keys raise InvalidOptionError with the nearest name."""
        _known(cls, data, "plan")
        toml.require_kinds("plan", data, FORM)
        table = cast(PlanTable, data)
        items = []
        for row in table.get("items", ()):
            _known(PlanItem, row, "plan item")
            toml.require_kinds("plan item", row, ITEM_FORM)
            items.append(_make(PlanItem, row, "plan item"))
        budget = table.get("budget") or BudgetTable()
        _known(Budget, budget, "budget")
        rest = {k: v for k, v in data.items() if k not in ("items", "budget", "notes")}
        notes = tuple(table.get("notes", ()))
        return _make(cls, {**rest, "items": tuple(items), "budget": Budget(**budget), "notes": notes}, "plan")

    def to_toml(self) -> str:
        """The plan as TOML; `from_toml` reads it back.

        Raises InvalidOptionError where an item was put together from Python objects, which a file cannot hold.
        """
        custom = [item.name for item in self.items if item.status == "enabled" and item.name.endswith(".custom")]
        if custom:
            raise InvalidOptionError(
                f"{custom[0]} is made of Python objects, which no TOML file can hold: keep the enable_cache(...) call"
            )
        if any(item.name == "lora" and item.status == "enabled" for item in self.items):
            raise InvalidOptionError("lora: no TOML file can hold the weights of a LoRA: keep loras.load(...)")
        budget = {k: v for k, v in asdict(self.budget).items() if v is not None}
        return toml.dumps({**self.to_dict(), "budget": budget})

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Read a plan written by `to_toml`."""
        if not isinstance(text, str):
            raise InvalidOptionError(f"a plan in TOML must be text, got {type(text).__name__}")
        return cls.from_dict(toml.loads(text, "plan"))

    # ---- tables ----------------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, ...]]:
        """Header and rows of the printed table: item, state, fidelity, gain with its origin, why or setting."""
        from . import table  # who prints no plan loads no table

        return table.rows(self.items)

    @property
    def title(self) -> str:
        """What was planned, for what machine, by which preset."""
        level = "" if self.level is None else f", level {self.level}"
        return f"{self.pipeline} ({self.family}), {self.hardware}, preset {self.preset}{level}"

    def __str__(self) -> str:
        from . import table

        model = f"{self.model}: " if self.model else ""
        return table.page(f"diffaccel plan: {model}{self.title}", self.rows(), self.notes)

    def _repr_html_(self) -> str:
        head, *rows = self.rows()
        cells = "".join(f"<th>{html.escape(c)}</th>" for c in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        title = html.escape(self.title)
        return f"<table><caption>{title}</caption><tr>{cells}</tr>{body}</table>"


def _known(cls: type[DataclassInstance], data: Mapping[str, object], what: str) -> None:
    if not isinstance(data, Mapping):
        raise InvalidOptionError(f"a {what} must be a table of names and values, got {type(data).__name__}")
    allowed = [f.name for f in fields(cls)]
    for key in data:
        if key not in allowed:
            raise unknown(f"{what} key", str(key), allowed)


def _make(cls: Callable[..., T], data: Mapping[str, object], what: str) -> T:
    try:
        return cls(**data)
    except TypeError as error:
        raise InvalidOptionError(f"incomplete {what}: {error}") from error
