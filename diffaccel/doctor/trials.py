"""Each lever alone on a pipeline with nothing of ours: attached, run, looked at, taken off, and the run repeated."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..api import accelerate, restore
from ..core.compat import REGISTRY
from ..core.report import RunReport
from ..errors import DiffaccelError, InvalidOptionError, unknown
from ..planner.levers import PLACES
from ..planner.plan import PlanItem
from .diagnosis import FAILED, PASSED, SKIPPED, Finding, Trial
from .observed import Observation, observe
from .signals import all_finite

ABOVE_PLAN = 1.05  # measured / predicted bytes
FORCED = 1e9  # a threshold that every step passes: a trial is of the machinery, not of a setting
NEAR = {"cache_threshold": FORCED, "cache_min_steps": 0, "cache_last_steps": 0}


@dataclass(frozen=True)
class Try:
    """One lever and the options that make it act in a short run; `reuses`: some calls must be answered by it."""

    place: str
    value: str | bool
    options: Mapping[str, object] = field(default_factory=dict)
    reuses: bool = False


TRIES: tuple[Try, ...] = (
    Try("quantization", "fp8", {"quantization_scheme": "weight_only"}),
    Try("quantization", "int8", {"quantization_scheme": "weight_only"}),
    Try("compile", True, {"compile_backend": "eager"}),
    Try("offload", "stage", {"offload_store": "disk"}),
    Try("offload", "layerwise", {"offload_store": "disk", "offload_resident_layers": 1}),
    Try("vae_tiling", "exact"),
    Try("attention", "native"),
    Try("attention", "sage", {"attention_variant": "reference"}),
    Try("guidance", "reuse", {"guidance_min_steps": 0, "guidance_last_steps": 0}, reuses=True),
    Try("cache", "adaptive", {"cache_tolerance": 1.0}),
    Try("cache", "first_block", NEAR, reuses=True),
    Try("cache", "interval", {"cache_min_steps": 0, "cache_last_steps": 0}, reuses=True),
    Try("cache", "deepcache", {"cache_min_steps": 0, "cache_last_steps": 0}, reuses=True),
)


def chosen(levers: str | Sequence[str]) -> tuple[Try, ...]:
    """The trials of these plan items ("cache.first_block", ...), or of "all"."""
    if levers == "all":
        return TRIES
    names = [levers] if isinstance(levers, str) else list(levers)
    known = {PLACES[row.place].item(row.value): row for row in TRIES}
    for name in names:
        if name not in known:
            raise unknown("lever to try", str(name), ["all", *known])
    return tuple(known[name] for name in names)


def try_all(
    pipe: Any, call: Mapping[str, Any], seed: int, levers: Sequence[Try]
) -> tuple[list[Trial], list[Finding], list[str]]:
    """(trials, findings, remarks) of levers on a pipeline that is not accelerated."""
    plain, again = observe(pipe, call, seed), observe(pipe, call, seed)
    if plain.error is not None:
        return [], [], [f"no lever was tried: the plain run raises {type(plain.error).__name__}"]
    if not _equal(plain.pictures, again.pictures):
        return [], [], ["no lever was tried: two plain runs of one seed differ, so that an undo cannot be judged"]
    trials, findings = [], list[Finding]()
    for row in levers:
        trial, found = _try(pipe, call, seed, row, plain)
        trials.append(trial)
        findings += found
    return trials, findings, []


def _try(pipe: Any, call: Mapping[str, Any], seed: int, row: Try, plain: Observation) -> tuple[Trial, list[Finding]]:
    name, before = PLACES[row.place].item(row.value), traces(pipe)
    with tempfile.TemporaryDirectory() as folder:
        files = {"offload_folder": folder} if row.place == "offload" else {}
        try:
            wish: dict[str, Any] = {row.place: row.value, **row.options, **files}
            accelerate(pipe, None, **wish)
        except InvalidOptionError as why:
            return Trial(name, FAILED, str(why)), [Finding("crash", name, str(why))]
        except DiffaccelError as why:
            return Trial(name, SKIPPED, str(why)), []
        try:
            item = pipe.acceleration.plan.items[0]
            if item.status != "enabled":
                return Trial(name, SKIPPED, item.reason), []
            seen = observe(pipe, call, seed)
            item = pipe.acceleration.plan.item(name)
        finally:
            restore(pipe)
    found = [*_of_the_run(name, item, seen, row), *_of_the_undo(pipe, call, seed, name, plain, before)]
    rate = seen.report.hit_rate if row.reuses and seen.report is not None else None
    return Trial(name, FAILED if found else PASSED, _note(item, seen, found), rate), found


def _note(item: PlanItem, seen: Observation, found: Sequence[Finding]) -> str:
    if found:
        return "; ".join(f"{finding.fault}: {finding.evidence}" for finding in found)
    return _stood_down(item.name, seen)


def _stood_down(name: str, seen: Observation) -> str:
    notes = seen.report.notes if seen.report is not None else []
    return next((note for note in notes if note.startswith(f"{name} stood down")), "")


def _of_the_run(name: str, item: PlanItem, seen: Observation, row: Try) -> Iterator[Finding]:
    report = seen.report
    if seen.error is not None:
        yield Finding("crash", name, f"{type(seen.error).__name__}: {str(seen.error)[:200]}")
        return
    if seen.pictures is not None and not all_finite(seen.pictures):
        yield Finding("not-finite", name, "the picture has NaN or infinity with this lever alone")
    if report is None:
        return
    if row.reuses and not _answered(report, name) and not _stood_down(name, seen):
        yield Finding("silent-fallback", name, f"no call of {len(report.steps)} was answered, and nothing says why")
    if report.cache_bytes_held:
        yield Finding("off-plan", name, f"{report.cache_bytes_held} bytes are held after the run")
    yield from above_plan(item)


def _answered(report: RunReport, name: str) -> bool:
    """Was a call left out, or (where one batch holds both branches) a half of it?"""
    return bool(report.hit_rate or report.stats.get(name, {}).get("steps_reuse"))


def above_plan(item: PlanItem) -> Iterator[Finding]:
    """Bytes measured against bytes predicted, where an item has both under one name."""
    measured = item.measured or {}
    for key, promised in item.predicted.items():
        found = measured.get(key)
        if not isinstance(promised, (int, float)) or not isinstance(found, (int, float)):
            continue
        if "bytes" in key and found > ABOVE_PLAN * promised:
            yield Finding("off-plan", item.name, f"{key}: {found} measured, {promised} predicted")
    peaks = [value for key, value in measured.items() if key.endswith("_peak_bytes") and isinstance(value, int)]
    gib = item.predicted.get("weights_gib")
    if isinstance(gib, float) and peaks and max(peaks) > ABOVE_PLAN * (gib + 1e-4) * 1024**3:
        yield Finding("off-plan", item.name, f"{max(peaks)} bytes of weights at once, {gib} GiB predicted")


# ---- undo ----------------------------------------------------------------------------------------------------------


def traces(pipe: Any) -> dict[str, object]:
    """What a lever might leave behind: classes, names of attributes and hooks, order of the weights."""
    found: dict[str, object] = {"pipe": (type(pipe), sorted(k for k in vars(pipe) if not k.startswith("_")))}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            found[f"{name} weights"] = [(key, value.dtype, value.shape) for key, value in part.state_dict().items()]
            for path, module in part.named_modules():
                own = {key for key in vars(module) if key != REGISTRY}
                hooks = tuple(getattr(vars(module).get(REGISTRY), "hooks", {}))
                found[f"{name}.{path}"] = (type(module), own, hooks, type(getattr(module, "processor", None)))
    return found


def _of_the_undo(
    pipe: Any, call: Mapping[str, Any], seed: int, name: str, plain: Observation, before: Mapping[str, object]
) -> Iterator[Finding]:
    after = traces(pipe)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if changed:
        yield Finding("undo", name, f"after restore {len(changed)} parts are not as before, such as {changed[0]}")
    if not _equal(observe(pipe, call, seed).pictures, plain.pictures):
        yield Finding("undo", name, "after restore the picture has other bits than before")


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
