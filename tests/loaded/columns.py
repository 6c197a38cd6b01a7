"""The levers that docs/loading.md asks about, and how each is seen to have acted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.invariants.levers import guidance_options
from tests.invariants.stacks import COMPILE, EXACT_VAE, LAYERWISE, STAGE


@dataclass(frozen=True)
class Column:
    """One lever.

    Attributes:
        name: key of `Row.cells`.
        title: head of the page's column.
        item: name of its plan item.
        options: overrides of `accelerate`; empty for what has a test of its own (LoRA, save).
        acted: (pipe after a run, plain picture, picture): did it act?
        exact: the picture must be the plain one, bit by bit.
        call: overrides of the call by family.
    """

    name: str
    title: str
    item: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    acted: Callable[[Any, torch.Tensor, torch.Tensor], bool] | None = None
    exact: bool = False
    call: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _stats(pipe: Any, item: str) -> dict[str, Any]:
    return dict(pipe.acceleration.report.stats.get(item, {}))


def _reused(pipe: Any, plain: torch.Tensor, seen: torch.Tensor) -> bool:
    return pipe.acceleration.report.hit_rate > 0 and not seen.equal(plain)


def _guided(pipe: Any, plain: torch.Tensor, seen: torch.Tensor) -> bool:
    return _stats(pipe, "guidance.reuse").get("steps_reuse", 0) > 0 and not seen.equal(plain)


def _attended(pipe: Any, plain: torch.Tensor, seen: torch.Tensor) -> bool:
    stats = _stats(pipe, "attention.sage")
    return stats["calls"].get("reference", 0) > 0 and not stats["fallbacks"] and not seen.equal(plain)


def _near(plain: torch.Tensor, seen: torch.Tensor) -> bool:
    return bool((seen - plain).abs().max() <= 1e-4 * plain.abs().max())


def _compiled(pipe: Any, plain: torch.Tensor, seen: torch.Tensor) -> bool:
    """In the second run: nothing is compiled again."""
    blocks = getattr(pipe, "unet", None) or pipe.transformer
    there = any(getattr(module, "_compiled_call_impl", None) is not None for module in blocks.modules())
    return there and _stats(pipe, "compile")["graphs_compiled"] == 0 and _near(plain, seen)


def _decoded(pipe: Any, plain: torch.Tensor, seen: torch.Tensor) -> bool:
    return _stats(pipe, "vae.tiling").get("exact", 0) > 0 and _near(plain, seen)


def _moved(item: str, key: str) -> Callable[[Any, torch.Tensor, torch.Tensor], bool]:
    return lambda pipe, plain, seen: _stats(pipe, item).get(key, 0) > 0


def _quantized(pipe: Any, plain: torch.Tensor, seen: torch.Tensor) -> bool:
    return not seen.equal(plain)


FREE = {"cache_min_steps": 0, "cache_last_steps": 0}
CFG = {"flux": {"true_cfg": True}}

COLUMNS = (
    Column(
        "schedule",
        "schedule cache",
        "cache.schedule",
        {"cache": "schedule", "cache_steps": [0, 1, 3], **FREE},
        _reused,
    ),
    Column(
        "first_block",
        "first-block cache",
        "cache.first_block",
        {"cache": "first_block", "cache_threshold": 1e9, **FREE},
        _reused,
    ),
    Column("guidance", "guidance reuse", "guidance.reuse", guidance_options(), _guided, call=CFG),
    Column(
        "attention",
        "8-bit attention",
        "attention.sage",
        {"attention": "sage", "attention_variant": "reference"},
        _attended,
    ),
    Column("compile", "regional compile", "compile", COMPILE, _compiled),
    Column("vae", "exact VAE", "vae.tiling", EXACT_VAE, _decoded),
    Column(
        "layerwise", "layerwise offload", "offload.layerwise", LAYERWISE, _moved("offload.layerwise", "blocks_moved"),
        exact=True,
    ),
    Column("stage", "stage offload", "offload.stage", STAGE, _moved("offload.stage", "denoise_in_bytes"), exact=True),
    Column("fp8", "fp8", "quantization.fp8", {"quantization": "fp8"}, _quantized),
    Column("int8", "int8", "quantization.int8", {"quantization": "int8"}, _quantized),
    Column("svdquant", "svdquant", "quantization.svdquant", {"quantization": "svdquant", "quantization_rank": 4},
           _quantized),
    Column("lora", "LoRA", "lora"),
    Column("save", "`save_pretrained`"),
)  # fmt: skip
BY_NAME = {column.name: column for column in COLUMNS}
