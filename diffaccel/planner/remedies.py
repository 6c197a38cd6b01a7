"""What would keep a budget that a plan does not: exact before equivalent before lossy, within the fidelity allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.slots import Fidelity
from ..ledger.book import Ledger
from ..ledger.exchange.account import Account
from ..ledger.hardware import Hardware
from .plan import Plan, PlanItem

Measure = Callable[[Account], float]
SHOWN = 3


@dataclass(frozen=True)
class Remedy:
    """A wish, and the plan item that it becomes."""

    wish: str
    name: str
    fidelity: Fidelity
    params: Mapping[str, object] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Items of one place take each other's."""
        return self.name.partition(".")[0]


REMEDIES = (
    Remedy("offload='stage'", "offload.stage", Fidelity.EXACT),
    Remedy("offload='layerwise'", "offload.layerwise", Fidelity.EXACT),
    Remedy("vae_tiling='exact'", "vae.tiling", Fidelity.EQUIVALENT),
    Remedy("compile=True", "compile", Fidelity.EQUIVALENT),
    Remedy("quantization='fp8'", "quantization.fp8", Fidelity.LOSSY),
    Remedy("quantization='int8'", "quantization.int8", Fidelity.LOSSY),
    Remedy("attention='sage'", "attention.sage", Fidelity.LOSSY),
    Remedy("cache='adaptive', level='fast'", "cache.adaptive", Fidelity.LOSSY, {"tolerance": 0.02}),
)


def remedies(ledger: Ledger, plan: Plan, machine: Hardware, measure: Measure, limit: float, unit: str) -> str:
    """A clause: what alone would keep the limit, else how near all of it together comes."""
    here = measure(_after(ledger, plan, machine, ()))
    allowed = [row for row in REMEDIES if row.fidelity.rank <= Fidelity(plan.budget.fidelity).rank]
    found = [(row, measure(_after(ledger, plan, machine, (row,)))) for row in allowed if _new(plan, row)]
    better = [(row, value) for row, value in found if value < here * 0.999]
    enough = [(row, value) for row, value in better if value <= limit]
    if enough:
        told = ", or ".join(f"{row.wish} ({value:.3g} {unit})" for row, value in enough[:SHOWN])
        return f"it would do with {told}"
    together: dict[str, tuple[Remedy, float]] = {}
    for row, value in better:  # of each place the best
        if row.place not in together or value < together[row.place][1]:
            together[row.place] = (row, value)
    if not together:
        return f"no lever that {plan.budget.fidelity!r} allows would change that: take fewer steps or a smaller size"
    rows = [row for row, _ in together.values()]
    value = measure(_after(ledger, plan, machine, rows))
    wishes = ", ".join(row.wish for row in rows)
    rest = (
        "which would do"
        if value <= limit
        else f"still {value - limit:.3g} {unit} too much: take fewer steps or a smaller size"
    )
    return f"with {wishes} together {value:.3g} {unit}, {rest}"


def _new(plan: Plan, row: Remedy) -> bool:
    """Would it change the plan? What was refused there would be refused again."""
    same = [item for item in plan.items if item.name == row.name]
    off = any(item.status == "refused" for item in same)
    on = any(item.status == "enabled" and not row.params for item in same)
    return not off and not on


def _after(ledger: Ledger, plan: Plan, machine: Hardware, more: Sequence[Remedy]) -> Account:
    """The book after the plan with these items in place of what holds their places."""
    places = [row.place for row in more]
    kept = [item for item in plan.items if item.name.partition(".")[0] not in places]
    made = [PlanItem(row.name, "call", "enabled", "", row.fidelity.value, row.params) for row in more]
    return ledger.apply(Rows((*kept, *made)), machine).last


@dataclass(frozen=True)
class Rows:
    """Items alone, as a plan has them."""

    items: Sequence[PlanItem]
