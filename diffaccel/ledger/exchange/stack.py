"""A plan applied to a ledger: the items one after another, each with what it gains on top of those before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ...errors import InvalidOptionError
from ..book import Ledger
from ..hardware import HARDWARE, Hardware, named
from ..timing import predict
from .account import Account, opened
from .levers import Item, Place, rule_of


class PlanRow(Protocol):
    """What is read of a plan item."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def fidelity(self) -> str: ...
    @property
    def params(self) -> Mapping[str, object]: ...
    @property
    def predicted(self) -> Mapping[str, object]: ...


class PlanLike(Protocol):
    """What is read of a plan."""

    @property
    def items(self) -> Sequence[PlanRow]: ...


@dataclass(frozen=True)
class Row:
    """One exchange: `gain` is the time of the generation before over after it (None: not known); GiB on the device."""

    name: str
    fidelity: str
    before: float
    after: float
    gain: float | None
    need_gib: float
    how: str


@dataclass(frozen=True)
class Stack:
    """The book before, one row for each enabled item, and the book after."""

    model: str
    hardware: str
    unit: str
    first: Account
    last: Account
    rows: tuple[Row, ...]
    spread: float = 1.0  # seconds lie within total / spread to total x spread in 80 % of sources, before any exchange

    @property
    def gain(self) -> float:
        """Of the whole stack."""
        return self.first.total / self.last.total

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        totals = {"before": self.first.total, "after": self.last.total, "gain": self.gain}
        need = {"need_gib_before": self.first.need_gib, "need_gib_after": self.last.need_gib}
        head = {"model": self.model, "hardware": self.hardware, "unit": self.unit, **totals, **need}
        return {**head, "rows": [asdict(row) for row in self.rows]}


def items_of(plan: PlanLike | Iterable[str]) -> list[Item]:
    """The enabled items of a plan; names stand for items with their defaults."""
    rows = getattr(plan, "items", None)
    if isinstance(rows, (list, tuple)):
        return [Item(r.name, r.params, r.predicted, r.fidelity) for r in rows if r.status == "enabled"]
    if isinstance(plan, str) or not isinstance(plan, Iterable):
        raise InvalidOptionError(f"plan must be a Plan or names of items, got {type(plan).__name__}")
    return [Item(str(name)) for name in plan]


def machine_of(ledger: Ledger, hardware: str | Hardware | None) -> Hardware | None:
    """The machine that was named, else that of the ledger's seconds."""
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        return named(hardware)
    return HARDWARE.get(ledger.seconds.hardware) if ledger.seconds is not None else None


def stacked(ledger: Ledger, plan: PlanLike | Iterable[str], hardware: str | Hardware | None = None) -> Stack:
    """Apply a plan. On a machine with a known peak times are seconds, else FLOPs; see `Account`."""
    machine = machine_of(ledger, hardware)
    if machine is not None and (ledger.seconds is None or ledger.seconds.hardware != machine.name):
        ledger = replace(ledger, seconds=predict(ledger, machine))
    items = items_of(plan)
    at = Place(ledger, machine, frozenset(item.name for item in items))
    first = account = opened(ledger)
    rows = []
    for item in items:
        outcome = rule_of(item.name)(account, item, at)
        before, after = account.total, outcome.account.total
        gain = before / after if outcome.known else None
        rows.append(Row(item.name, item.fidelity, before, after, gain, outcome.account.need_gib, outcome.how))
        account = outcome.account
    seconds = ledger.seconds
    spread = 1.0 if seconds is None else seconds.high / seconds.total
    name = "" if machine is None else machine.name
    return Stack(ledger.model, name, first.unit, first, account, tuple(rows), spread)
