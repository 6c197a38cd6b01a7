"""How torch.compile fares with step caches: graphs, breaks, and whether a second identical run compiles again.

Backend "eager", so nothing but the capture is at work; a FLUX of 1 + 2 blocks, untrained, in steps that are
computed and reused in turn. `whole` compiles the denoiser as one module, `blocks` compiles block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from cache_peers import dit
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from diffaccel import accelerate, testbed
from diffaccel.errors import DiffaccelError
from diffaccel.testbed.build import Size, pipeline

STEPS = 6
GUARDS = {"cache_min_steps": 0, "cache_last_steps": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "first_block": {"cache": "first_block", "cache_threshold": 0.999, **GUARDS},
    "schedule": {"cache": "schedule", "cache_steps": "10" * (STEPS // 2), "cache_scope": "stack", **GUARDS},
}


def _run(pipe: Any) -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    kwargs = {"num_inference_steps": STEPS, "generator": generator, "output_type": "latent"}
    pipe(testbed.prompts("test", 1), **kwargs, **testbed.call_kwargs("image"))


def _whole(pipe: Any) -> None:
    pipe.transformer.compile(backend="eager")


def _blocks(pipe: Any) -> None:
    pipe.transformer.compile_repeated_blocks(backend="eager")


def _ours(options: Mapping[str, Any], compile_: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Our cache on what the user compiled, or, without `compile_`, with our own block-wise lever."""

    def prepare(pipe: Any) -> None:
        if compile_ is None:
            accelerate(pipe, preset=None, strict=True, compile=True, compile_backend="eager", **options)
        else:
            compile_(pipe)
            accelerate(pipe, preset=None, strict=True, **options)

    return prepare


def _then(enable: Callable[[Any], None], compile_: Callable[[Any], None]) -> Callable[[Any], None]:
    def prepare(pipe: Any) -> None:
        enable(pipe)
        compile_(pipe)

    return prepare


def _native(pipe: Any) -> None:
    from diffusers import FirstBlockCacheConfig

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.999))


def _dit(pipe: Any) -> None:
    dit(Fn_compute_blocks=1, max_warmup_steps=1, residual_diff_threshold=0.999)(pipe, None)


def _variants(installed: Mapping[str, str]) -> dict[str, Callable[[Any], None]]:
    out: dict[str, Callable[[Any], None]] = {"plain-whole": _whole, "plain-blocks": _blocks}
    for name, options in SETTINGS.items():
        out[f"ours-{name}-whole"] = _ours(options, _whole)
        out[f"ours-{name}-blocks"] = _ours(options, None)
    enablers = {"native": ("diffusers", _native), "cache-dit": ("cache-dit", _dit)}
    for name, (library, enable) in enablers.items():
        if installed[library] != "not installed":
            out[f"{name}-whole"], out[f"{name}-blocks"] = _then(enable, _whole), _then(enable, _blocks)
    return out


def graphs(installed: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Per variant: graphs of the first run, breaks in it, and graphs that the second one adds."""
    out: dict[str, dict[str, Any]] = {}
    for name, prepare in _variants(installed).items():
        torch._dynamo.reset()
        counters.clear()
        pipe = pipeline(Size(double_blocks=1, single_blocks=2))
        pipe.set_progress_bar_config(disable=True)
        try:
            prepare(pipe)
            _run(pipe)
            first = counters["stats"]["unique_graphs"]
            breaks = sum(counters["graph_break"].values())
            _run(pipe)
        except (DiffaccelError, TorchDynamoException, RuntimeError, TypeError, AttributeError) as error:
            out[name] = {"fails": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            continue
        again = counters["stats"]["unique_graphs"] - first
        out[name] = {"graphs": first, "breaks": breaks, "new_in_second_run": again}
    torch._dynamo.reset()
    return out
