"""The levers of this version, where they act, and memoised outputs of fresh pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from diffaccel import accelerate, attach
from tests import tiny

LEVERS = ("cache", "attention", "guidance", "offload", "solver", "both", "attach")
CACHES = tiny.TRANSFORMERS  # families on which the first-block cache acts
ATTENTION = tiny.FAMILIES  # families whose attention can be given to another backend
DISPATCHED = ("flux", "wan")  # families whose processors obey diffusers' own set_attention_backend
GUIDANCE = ("wan", "wan22", "wan_v2v", "sd3", "sdxl")  # families whose standard call has a second guidance branch
CACHE_ITEM = "cache.first_block"
BACKEND = "flex"  # a backend whose results differ from the default's in their last bits

# Chosen so that of six steps some are computed and some reused.
THRESHOLD = {
    "flux": 0.3,
    "flux_img2img": 0.3,
    "sd3": 0.3,
    "sdxl": 0.3,
    "wan": 0.11,
    "wan22": 0.11,
    "wan_v2v": 0.11,
}
REUSE_ALL = 1e9


class Stop(RuntimeError):
    """What the tests raise inside a run."""


def cache_options(family: str, **changes: Any) -> dict[str, Any]:
    """Overrides that switch the first-block cache on with no guard in the way."""
    options = {
        "cache": "first_block",
        "cache_threshold": THRESHOLD[family],
        "cache_min_steps": 0,
        "cache_last_steps": 0,
    }
    return options | changes


def guidance_options(**changes: Any) -> dict[str, Any]:
    """Overrides that leave the unconditional branch out of every second step, with no guard in the way."""
    options = {"guidance": "reuse", "guidance_interval": 2, "guidance_first_steps": 1}
    return options | {"guidance_min_steps": 0, "guidance_last_steps": 0} | changes


def lever_options(family: str, lever: str) -> dict[str, Any]:
    """The overrides of a lever."""
    options: dict[str, Any] = {}
    if lever in ("cache", "both"):
        options |= cache_options(family)
    if lever in ("attention", "both"):
        options |= {"attention": BACKEND}
    if lever == "guidance":
        options |= guidance_options()
    if lever == "solver":
        options |= {"solver": "abm"}
    if lever == "offload":  # acts on families with a stack of blocks
        options |= {"offload": "layerwise", "offload_store": "disk", "offload_resident_layers": 1}
    return options


def put_on(pipe: Any, family: str, lever: str, **changes: Any) -> Any:
    """Accelerate `pipe` with a lever."""
    if lever == "attach":
        return attach(pipe)
    return accelerate(pipe, preset=None, **(lever_options(family, lever) | changes))


def accelerated(family: str, lever: str = "cache", **changes: Any) -> Any:
    """A fresh accelerated pipeline."""
    return put_on(tiny.build(family), family, lever, **changes)


def is_exact(family: str, lever: str) -> bool:
    """Whether the lever cannot change the output of the family: it does not act there."""
    caches = lever in ("cache", "both") and family in CACHES
    attends = lever in ("attention", "both") and family in ATTENTION
    guides = lever == "guidance" and family in GUIDANCE
    return not (caches or attends or guides or lever == "solver")


_memo: dict[str, Any] = {}


def _remember(key: str, make: Callable[[], Any]) -> Any:
    if key not in _memo:
        _memo[key] = make()
    return _memo[key]


def plain(family: str, **call: Any) -> torch.Tensor:
    """The output of a pipeline never touched."""
    key = f"plain {family} {sorted(call.items())}"
    found: torch.Tensor = _remember(key, lambda: tiny.run(tiny.build(family), family, **call))
    return found.clone()


def fresh(family: str, lever: str = "cache", **call: Any) -> torch.Tensor:
    """The output of the first run of a freshly accelerated pipeline."""
    return fresh_run(family, lever, **call)[0]


def fresh_run(family: str, lever: str = "cache", **call: Any) -> tuple[torch.Tensor, list[tuple[Any, ...]]]:
    """Output and step records (see `trace`) of the first run of a freshly accelerated pipeline."""

    def make() -> tuple[torch.Tensor, list[tuple[Any, ...]]]:
        pipe = accelerated(family, lever)
        return tiny.run(pipe, family, **call), trace(pipe)

    result, records = _remember(f"{lever} {family} {sorted(call.items())}", make)
    return result.clone(), list(records)


def trace(pipe: Any) -> list[tuple[Any, ...]]:
    """(step index, branch, computed) of every denoiser call of the last run."""
    return [(step.index, step.branch, bool(step.computed)) for step in pipe.acceleration.report.steps]


def pattern(pipe: Any, branch: str | None = None) -> list[bool]:
    """Which denoiser calls of the last run were computed, in order; of one branch where given."""
    return [computed for _, name, computed in trace(pipe) if branch in (None, name)]


def item(plan: Any, prefix: str) -> Any:
    """The one plan item whose name starts with `prefix`."""
    found = [entry for entry in plan.items if entry.name.startswith(prefix)]
    assert len(found) == 1, f"plan items {[entry.name for entry in plan.items]}, wanted one {prefix!r}"
    return found[0]


def raise_at(step: int, error: BaseException) -> Callable[..., dict[str, Any]]:
    """A step callback that raises at the end of a step."""

    def callback(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == step:
            raise error
        return kwargs

    return callback


def at_step(step: int, act: Callable[[Any], None]) -> Callable[..., dict[str, Any]]:
    """A step callback that calls `act(pipe)` at the end of a step."""

    def callback(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == step:
            act(pipe)
        return kwargs

    return callback


@contextlib.contextmanager
def counted(module: torch.nn.Module) -> Iterator[list[int]]:
    """Count the calls of a module in a one-element list."""
    calls = [0]

    def note(*_: Any) -> None:
        calls[0] += 1

    handle = module.register_forward_hook(note)
    try:
        yield calls
    finally:
        handle.remove()


def inner(pipe: Any) -> torch.nn.Module:
    """A module that runs exactly when the blocks after the first are computed."""
    block = tiny.blocks(tiny.denoiser(pipe))[1]
    module: torch.nn.Module = block.attn1 if hasattr(block, "attn1") else block.attn
    return module


def second_size(family: str) -> dict[str, int]:
    """Another image size than that of `tiny.call_kwargs`."""
    if family in ("wan", "wan22"):
        return {"height": 32, "width": 48}
    return {"height": 24, "width": 16} if family == "sdxl" else {"height": 12, "width": 8}


def second_prompt(**more: Any) -> dict[str, Any]:
    """Overrides of a call with another prompt and another seed."""
    return {"prompt": tiny.PROMPTS[1], "seed": 5} | more
