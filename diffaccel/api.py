"""The whole story on one page: plan, accelerate, restore.

pipe = accelerate(pipe, preset="auto")   # the same object, accelerated
print(pipe.acceleration)                 # what is on, and why the rest is not
image = pipe("a red ring").images[0]
restore(pipe)                            # as if nothing had happened
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, overload

from .core.compat import host_edit
from .core.unloaded import planning
from .errors import InvalidOptionError
from .handle import Acceleration, handle_of, undress
from .ledger.hardware import Hardware
from .pipeline import dress
from .planner import presets as _presets
from .planner.options import LEVEL, Budget
from .planner.plan import Plan
from .planner.presets.fitting import elsewhere
from .planner.resolve import choose_hardware, require_pipeline, resolve

P = TypeVar("P")


@host_edit
def accelerate(
    pipe: P,
    preset: str | Plan | None = "auto",
    *,
    level: str | None = None,
    budget: Budget | None = None,
    hardware: str | Hardware | None = None,
    strict: bool = False,
    **overrides: object,
) -> P:
    """Accelerate a diffusers pipeline in place and return it.

    Args:
        pipe: any diffusers pipeline; no file or class of diffusers is changed.
        preset: a preset's name (`presets()` lists them), a path to a TOML file, a `Plan`, "auto", or None for
            only the overrides (with none of them: attach the verbs and the report, change nothing).
        level: "careful" (nearest to the plain picture), "balanced" (the presets' own) or "fast": the one dial, which
            sets the numbers of the levers that have levels (the adaptive cache). A number that is given, such as
            `cache_tolerance`, goes before it.
        budget: what may be spent; see `Budget`.
        hardware: plan for this machine ("4090", "h100", "cpu", ...) instead of the one here; warns where it is
            another one.
        strict: raise where something asked for cannot act, instead of skipping it with a reason.
        **overrides: wishes on top of the preset, e.g. `cache="first_block", cache_threshold=0.1,
            attention="native"`; None switches a place off.

    Returns:
        The same object, now with `pipe.acceleration` and the `enable_*` / `disable_*` verbs. A second call swaps
        cleanly: the first is undone, then the new plan attached; on an error the first stays in force. LoRAs stay
        loaded unless `lora=False`.

    Raises:
        InvalidOptionError: unknown preset, option or value (with the nearest name), or not a pipeline.
        UnsupportedModelError: the preset is for another family (or, with `strict`, an item cannot act).
        IncompatibleError: the denoiser is shared with another accelerated pipeline.
        BudgetError: the budget cannot be met.
    """
    overrides = _with_level(level, overrides)
    decision = resolve(pipe, preset, budget, hardware, strict, overrides)
    where = None if hardware is None else elsewhere(decision.target.hardware, choose_hardware(pipe, None))
    if where is not None:
        warnings.warn(f"hardware='{hardware}': {where}", UserWarning, stacklevel=3)  # 2 is the frame of `host_edit`
    before = handle_of(pipe)
    if before is not None and before.owns(pipe):
        kept, note = before.loras.over(decision.wishes) if before.has_loras else ({}, None)
        if kept:
            decision = resolve(pipe, preset, budget, hardware, strict, {**overrides, **kept})
        before.adopt(decision, note)
        return pipe
    handle = Acceleration(decision.target.pipe, decision)
    handle.adopt(decision)
    dress(pipe, handle)
    return pipe


@host_edit
def restore(pipe: P) -> P:
    """Undo everything `accelerate` did to `pipe` and return it; a no-op where there is nothing to undo."""
    require_pipeline(pipe, weights=False)
    handle = handle_of(pipe)
    if handle is not None and handle.owns(pipe):
        handle.restore()
    undress(pipe)
    return pipe


def attach(pipe: P) -> P:
    """Give `pipe` the verbs and the report, and change nothing: `accelerate(pipe, preset=None)`."""
    return accelerate(pipe, preset=None)


def plan(
    pipe: object | str | Path,
    preset: str | Plan | None = "auto",
    *,
    level: str | None = None,
    budget: Budget | None = None,
    hardware: str | Hardware | None = None,
    strict: bool = False,
    **overrides: object,
) -> Plan:
    """The decision `accelerate` would make with the same arguments, and what it gains; touches nothing.

    `pipe` may also be what has no weights yet: a pipeline on meta, the name of a model that the ledger knows
    ("flux.1-dev"), or a folder of a pipeline's configs.
    """
    from .ledger.models import resolve as model_of  # brings the ledger's closed forms along
    from .planner.blueprint import pipeline_of
    from .planner.pricing import priced

    model = model_of(pipe) if isinstance(pipe, (str, Path)) else None
    found, origin = (pipe, "") if model is None else pipeline_of(model)
    with planning():
        decided = resolve(found, preset, budget, hardware, strict, _with_level(level, overrides), weights=False)
        costed = priced(decided.plan, decided.target, model)
    return replace(costed, model=origin) if origin else costed


def _with_level(level: str | None, overrides: dict[str, object]) -> dict[str, object]:
    return overrides if level is None else {**overrides, LEVEL: level}


@overload
def presets() -> list[str]: ...
@overload
def presets(name: None) -> list[str]: ...
@overload
def presets(name: str) -> str: ...
def presets(name: str | None = None) -> list[str] | str:
    """The names of the bundled presets, or the text of one."""
    if name is not None and not isinstance(name, str):
        raise InvalidOptionError(f"name must be the name of a preset or None, got {name!r}")
    return _presets.names() if name is None else _presets.text(name)
