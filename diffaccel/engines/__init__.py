"""A plan as another engine's command or script, and what that engine cannot express; docs/engines.md.

What an engine takes is data: `records/`, with the commits it was read from. Nothing of an engine is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from ..errors import InvalidOptionError, unknown
from ..planner.plan import Plan
from .request import Export, Request

ENGINES = {"diffusers": "diffusers_script", "sglang": "sglang", "vllm-omni": "vllm_omni", "xdit": "xdit"}


class _Writer(Protocol):
    EXTRAS: Mapping[str, str]  # what the engine has and no plan does: name -> what it takes

    def write(self, plan: Plan, request: Request, extras: Mapping[str, str]) -> Export: ...


def extras_of(engine: str) -> Mapping[str, str]:
    """What `extras` may say for this engine: name -> what it takes."""
    return _writer(engine).EXTRAS


def export(plan: Plan, engine: str, request: Request, extras: Mapping[str, str] | None = None) -> Export:
    """The plan's enabled items as a command or script of this engine.

    Args:
        plan: what `diffaccel.plan` decided.
        engine: "sglang", "vllm-omni", "xdit" or "diffusers".
        request: one generation: which model, what size, on how many GPUs.
        extras: what the engine has besides, such as {"progressive": "0.05"}; see `extras_of`.

    Raises:
        InvalidOptionError: an unknown engine or extra, a value it does not take, or an extra that excludes an item.
        UnsupportedModelError: a model that the engine does not run.
    """
    writer = _writer(engine)
    given = dict(extras or {})
    for name in given:
        if name not in writer.EXTRAS:
            raise unknown(f"extra of {engine}", name, writer.EXTRAS)
    if request.gpus < 1:
        raise InvalidOptionError(f"gpus must be a whole number of at least 1, got {request.gpus}")
    return writer.write(plan, request, given)


def _writer(engine: str) -> _Writer:
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    return cast(_Writer, importlib.import_module(f".{ENGINES[engine]}", __name__))
