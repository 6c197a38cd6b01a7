"""Resolve wishes against a pipeline: a Plan, and the accelerators it enables. Touches nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from ..core.accelerator import Accelerator, Fidelity, Placed, Slot, Target, Verdict
from ..core.compat import int8_units
from ..core.modular import is_modular
from ..core.options import BOOLEAN, GOT, confirm, is_number, short
from ..core.place import BALANCED, LAST, Place
from ..core.stack import weights_on_meta
from ..errors import BudgetError, InvalidOptionError, InvalidPipelineError, UnsupportedModelError, unknown
from ..ledger import hardware as machines
from ..ledger.hardware import Hardware
from ..models.registry import lookup
from . import toml
from .cache_budget import govern
from .learn import LearnBlocks
from .levers import PLACES, RULES, in_order
from .options import LEVEL, Budget, build, by_level, level_of, validate, wished
from .plan import Plan, PlanItem
from .presets import Preset, load
from .presets.fitting import fit
from .rivals import settle

if TYPE_CHECKING:
    from ..core.protocols import Pipeline

LATER = "not in this version"


class Judged(NamedTuple):
    """What became of one place's wish."""

    item: PlanItem
    accelerator: Accelerator | None
    verdict: Verdict


class Decision(NamedTuple):
    """A plan, and what puts it into effect: levers in order, on a target; `wishes` are what was asked for."""

    plan: Plan
    levers: tuple[Placed, ...]
    target: Target
    wishes: dict[str, object]
    judged: Mapping[str, Judged]  # by place

    def require(self, key: str) -> None:
        """Raise where what was asked of this place cannot act."""
        if key in self.judged:
            _require(self.judged[key])

    def untouched(self, key: str, wishes: Mapping[str, object]) -> dict[str, Judged]:
        """The judgements that still stand where only the place `key` is asked for something else."""
        if PLACES[key].slot is Slot.WEIGHT:
            return {}  # what others said of the weights may no longer be true

        def asked(wishes: Mapping[str, object], place: str) -> dict[str, object]:
            own = {name: value for name, value in wishes.items() if name == place or PLACES[place].owns(name)}
            return {**by_level(place, wishes), **own}

        return {
            place: row
            for place, row in self.judged.items()
            if place != key and row.verdict.ok and asked(self.wishes, place) == asked(wishes, place)
        }


def require_pipeline(pipe: object, weights: bool = True) -> Pipeline:
    """`pipe`. Raises InvalidPipelineError unless it is a diffusers pipeline (with its weights in place)."""
    from diffusers import DiffusionPipeline

    if not isinstance(pipe, DiffusionPipeline) and not is_modular(pipe):
        raise InvalidPipelineError(
            "pipe must be a diffusers pipeline (a DiffusionPipeline or a ModularPipeline), got "
            f"{type(pipe).__module__}.{type(pipe).__qualname__}"
        )
    found = cast("Pipeline", pipe)
    for name, component in found.components.items() if weights else ():
        if isinstance(component, torch.nn.Module):
            missing, total = weights_on_meta(component)
            if missing:
                raise InvalidPipelineError(
                    f"pipe.{name}: {missing} of {total} parameters are on the meta device (no weights loaded); load "
                    "the pipeline fully before accelerating it"
                )
    return found


def choose_hardware(pipe: object, hardware: str | Hardware | None) -> Hardware:
    """The named machine, or the one the pipeline runs on."""
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        if not isinstance(hardware, str):
            raise InvalidOptionError(f"hardware must be a name or None, got {hardware!r}")
        return machines.named(hardware)
    # A property that fails where a component is a bare nn.Module, which has no `device`.
    device = getattr(pipe, "_execution_device", None)
    return machines.detect("cpu" if device is None else device)


def gather(preset: str | Plan | Preset | None, overrides: Mapping[str, object]) -> tuple[Preset, dict[str, object]]:
    """(preset, its wishes with the overrides on top)."""
    if isinstance(preset, Preset):
        base = preset
    elif preset is None:
        base = Preset("none")
    elif isinstance(preset, Plan):
        published = {item.name: item.published for item in preset.items if item.published}
        base = Preset(
            preset.preset, _wishes_of(preset), families=(preset.family,), level=preset.level, published=published
        )
    elif isinstance(preset, (str, os.PathLike)):
        base = load(os.fspath(preset))
    else:
        raise InvalidOptionError(f"preset must be a name, a path to a TOML file, a Plan or None, got {preset!r}")
    validate(base.wishes)
    level = {} if base.level in (None, BALANCED) else {LEVEL: base.level}
    wishes = {**level, **base.wishes, **overrides}
    for key, value in overrides.items():
        # Another method than the preset's: the preset's numbers do not apply.
        place = PLACES.get(key)
        if place is not None and place.prefix and value != base.wishes.get(key):
            wishes = {k: v for k, v in wishes.items() if k in overrides or not place.owns(k)}
    validate(wishes)
    if overrides.get(LEVEL) is not None:  # who turns the dial does not mean the preset's numbers
        set_by_it = {name for key in wishes if key in PLACES for name in by_level(key, wishes)}
        wishes = {k: v for k, v in wishes.items() if k in overrides or k not in set_by_it}
    return base, validate(wishes)


def _plan_in_file(preset: str | Plan | None) -> str | Plan | None:
    """The Plan, where `preset` is the path to one that `Plan.to_toml` wrote; else `preset` as it is."""
    if isinstance(preset, (str, os.PathLike)) and os.fspath(preset).endswith(".toml") and os.path.isfile(preset):
        text = Path(preset).read_text(encoding="utf-8")
        if "pipeline" in toml.loads(text, f"preset {os.fspath(preset)!r}"):
            return Plan.from_toml(text)
    return preset


def _stands_for(item: PlanItem, place: Place, value: str | bool) -> bool:
    """Is it the item of this value? Where values share an item name (vae.tiling), fidelity tells them apart."""
    if value is False or value not in place.ready or item.name != place.item(value):
        return False
    twins = [other for other in place.values if other is not False and place.item(other) == item.name]
    return len(twins) == 1 or place.levers[str(value)].config().fidelity.value == item.fidelity


def _wishes_of(plan: Plan) -> dict[str, object]:
    """The override values that stand for a plan's enabled items."""
    wishes: dict[str, object] = {}
    names = [place.item(value) for place in PLACES.values() for value in place.values]
    for item in plan.items:
        if item.status == "enabled" and item.name not in names:
            raise unknown("plan item", item.name, names)
        for place in PLACES.values():
            for value in place.values:
                if item.status == "enabled" and _stands_for(item, place, value):
                    wishes[place.key] = value
                    params = item.params if place.prefix else {}
                    given = {place.prefix + k: v for k, v in params.items() if v is not None}
                    level = {} if plan.level is None else by_level(place.key, {place.key: value, LEVEL: plan.level})
                    wishes.update({k: v for k, v in given.items() if k not in level or level[k] != v})
    return wishes


def resolve(
    pipe: object,
    preset: str | Plan | None,
    budget: Budget | None,
    hardware: str | Hardware | None,
    strict: bool,
    overrides: Mapping[str, object],
    known: Mapping[str, Judged] | None = None,
    weights: bool = True,
) -> Decision:
    """Decide what is on. With `strict`, anything that cannot act raises instead of being skipped. `known` are places
    that were judged before, on the same pipeline, and are as they were. Without `weights`, modules may be on meta."""
    strict = confirm("strict", strict, BOOLEAN, GOT)
    preset = _plan_in_file(preset)
    base, wishes = gather(preset, overrides)
    if budget is not None and not isinstance(budget, Budget):
        gib = budget if is_number(budget) else 16
        raise InvalidOptionError(
            f"budget must be a Budget or None, got {short(budget)}: write budget=Budget(memory_gib={gib})"
        )
    if budget is None:
        budget = preset.budget if isinstance(preset, Plan) else Budget(fidelity=base.fidelity or "lossy")
    pipe = require_pipeline(pipe, weights)
    target = Target(pipe, lookup(pipe), choose_hardware(pipe, hardware))
    if base.families is not None and target.spec.family not in base.families:
        raise UnsupportedModelError(
            f"preset {base.name!r} is for {', '.join(base.families)}, but {type(pipe).__name__} is of the family "
            f"{target.spec.family!r}"
        )
    base, wishes = gather(fit(base, preset, target.spec.family, target.hardware, overrides), overrides)
    wishes, taken = settle(wishes, overrides)
    worst = min(Fidelity(budget.fidelity), Fidelity(base.fidelity or "lossy"), key=lambda f: f.rank)
    wishes, ungoverned = govern(budget, wishes, base.calibration, strict)
    fixed = isinstance(preset, Plan) or "offload" in overrides
    wishes, unneeded, changed = _within_memory(target, budget, wishes, fixed)
    chosen = _choose(target, wishes, unneeded, worst, budget, known or {})
    for key in chosen.judged if strict else ():
        _require(chosen.judged[key])
    led = _led_by_level(wishes, chosen)
    idle = () if led or wishes.get(LEVEL) is None else (_idle(wishes, chosen),)
    if strict and idle and overrides.get(LEVEL) is not None:
        raise InvalidOptionError(idle[0])
    items = [_quoted(item, base.published) for item in (*chosen.items, *ungoverned)]
    plan = Plan(
        preset=base.name,
        pipeline=type(pipe).__name__,
        family=target.spec.family,
        hardware=str(target.hardware),
        items=tuple(items),
        budget=budget,
        notes=(*base.notes, *taken, *changed, *chosen.remarks, *idle),
        level=level_of(wishes) if led else None,
    )
    return Decision(plan, chosen.levers, target, wishes, chosen.judged)


@dataclass(frozen=True)
class _Choice:
    """What each place's wish came to."""

    items: tuple[PlanItem, ...]
    levers: tuple[Placed, ...]
    judged: Mapping[str, Judged]
    remarks: tuple[str, ...]


def _choose(
    target: Target,
    wishes: dict[str, object],
    unneeded: PlanItem | None,
    worst: Fidelity,
    budget: Budget,
    known: Mapping[str, Judged],
) -> _Choice:
    items: list[PlanItem] = []
    levers: list[Placed] = []
    judged: dict[str, Judged] = {}
    wanted = [key for key in wishes if key in PLACES and wishes[key] not in (None, False)]
    for key in in_order([*wanted, *(["offload"] if unneeded is not None else [])]):
        if key == "offload" and unneeded is not None:
            items.append(unneeded)
            continue
        judged[key] = known.get(key) or _decide(PLACES[key], wishes, target, worst, budget)
        item, accelerator, verdict = judged[key]
        items.append(item)
        if accelerator is not None and verdict.ok:
            levers.append(Placed(PLACES[key].rank, accelerator))
    if any(item.status == "skipped" for item in items) and LearnBlocks().check(target).ok:
        levers.append(Placed(LAST, LearnBlocks()))
    return _Choice(tuple(items), tuple(levers), judged, _remarks(wishes, target))


def _within_memory(
    target: Target, budget: Budget, wishes: dict[str, object], fixed: bool
) -> tuple[dict[str, object], PlanItem | None, tuple[str, ...]]:
    """The wishes as memory has them, an offload that is not needed, and notes."""
    if budget.memory_gib is None and not wished(wishes, "offload"):
        return wishes, None, ()
    from .offload_budget import limit_memory  # who offloads nothing loads nothing about it

    return limit_memory(target, budget, wishes, fixed)


def _quoted(item: PlanItem, published: Mapping[str, Mapping[str, object]]) -> PlanItem:
    """The item with what its preset quotes of others."""
    found = published.get(item.name) if item.status == "enabled" else None
    return item if found is None else replace(item, published=found)


def _led_by_level(wishes: Mapping[str, object], chosen: _Choice) -> list[str]:
    """Override keys whose values in force are the level's."""
    on = [key for key, row in chosen.judged.items() if row.verdict.ok]
    return [name for key in on for name in by_level(key, wishes) if name not in wishes]


def _idle(wishes: Mapping[str, object], chosen: _Choice) -> str:
    """Why the level that was asked for sets nothing."""
    given = [name for key in chosen.judged for name in by_level(key, wishes) if name in wishes]
    levelled = [f"{key}={value!r}" for key in PLACES for value, lever in PLACES[key].levers.items() if lever.levels]
    why = (
        f"{given[0]} was given, which goes before it" if given else f"it is for {', '.join(levelled)}, which is not on"
    )
    return f"level={level_of(wishes)!r} sets nothing here: {why}"


def _require(row: Judged) -> None:
    if not row.verdict.ok and not row.verdict.satisfied:
        raise row.verdict.error(f"{row.item.name}: {row.verdict.reason}")


def _remarks(wishes: dict[str, object], target: Target) -> tuple[str, ...]:
    """What the rules say about these wishes here."""
    kind = target.hardware.kind
    device = f"{kind} with INT8 units" if kind == "cpu" and int8_units() else kind
    return tuple(rule.remark for rule in RULES if rule.holds(wishes, device))


def _decide(place: Place, wishes: dict[str, object], target: Target, worst: Fidelity, budget: Budget) -> Judged:
    value = wished(wishes, place.key)
    name = place.item(value)
    if value not in place.ready:
        ready = ", ".join(repr(v) for v in place.ready if v is not False)
        reason = f"{LATER}" + (f" (ready: {ready})" if ready else "")
        verdict = Verdict.no(reason, InvalidOptionError)
        return Judged(PlanItem(name, place.slot.value, "skipped", reason, "unknown"), None, verdict)
    accelerator = build(place.key, value, wishes)
    fidelity = accelerator.fidelity
    verdict = accelerator.check(target)
    if verdict.ok and fidelity.rank > worst.rank:
        verdict = Verdict.no(f"{fidelity.value}, but only {worst.value} is allowed", BudgetError)
    kept = getattr(accelerator, "min_psnr_db", None)  # a lever that keeps the promise itself
    if verdict.ok and budget.min_psnr_db != kept and budget.min_psnr_db is not None and fidelity is Fidelity.LOSSY:
        verdict = Verdict.no(
            f"lossy and unmeasured on this model, but the budget asks for {budget.min_psnr_db:g} dB",
            BudgetError,
        )
    # asdict would take nested configs apart; an accelerator that holds some says itself what a plan shows.
    own = getattr(accelerator, "params", None)
    params = {} if not verdict.ok else own() if own is not None else asdict(accelerator)
    fixed = place.levers[str(value)].fixed  # what the value itself says
    item = PlanItem(
        name=name,
        slot=place.slot.value,
        status="enabled" if verdict.ok else verdict.status,
        reason=verdict.reason,
        fidelity=fidelity.value,
        params={k: v for k, v in params.items() if v is not None and k not in fixed},
        predicted=accelerator.predict(target) if verdict.ok else {},
    )
    return Judged(item, accelerator, verdict)
