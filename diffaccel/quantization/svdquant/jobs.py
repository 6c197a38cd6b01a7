"""From a model and a policy to the list of things to quantize: single layers, or layers that share one input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...models.fusions import GELU_CLASSES, JOINED, SHARED_INPUT
from ...models.spec import ModelSpec
from ..policy import Policy, Selection, select
from .calibration import Seen
from .formats import SHIFT, Codes
from .math import Layer, Part, Recipe, corrected_bias, quantize_layer

Tensor = torch.Tensor


LAYOUTS = ("best", "nunchaku", "lite")


@dataclass(frozen=True)
class Job:
    """Layers (names relative to the denoiser) quantized as one, and the parts of their input.

    Attributes:
        names: one name, or several layers that read the same input, whose rows are put on top of each other.
        splits: (columns, comes out of a GELU) of each part of the input.
    """

    names: tuple[str, ...]
    splits: tuple[tuple[int, bool], ...]


def jobs(
    module: nn.Module, spec: ModelSpec, policy: Policy | None, layout: str = "best"
) -> tuple[list[Job], Selection]:
    """What to quantize of a denoiser, in order, and the policy's selection.

    Args:
        layout: "best": every layer by itself, inputs that come partly out of a GELU in two parts. "nunchaku": the
            same, but layers that read one input are quantized as one (one smoothing, one low-rank input), as
            nunchaku's files fuse them. "lite": every layer by itself, in one part, with signs.
    """
    selection = select(module, spec, policy)
    plain: dict[str, Any] = {name: module.get_submodule(name) for name in selection.quantized}
    done: set[str] = set()
    found: list[Job] = []
    for name in selection.quantized:
        if name in done:
            continue
        group = _group(name, spec, plain) if layout == "nunchaku" else (name,)
        done.update(group)
        width = plain[name].in_features
        splits = ((width, False),) if layout == "lite" else splits_of(module, name, width, spec)
        found.append(Job(group, splits))
    return found, selection


def _group(name: str, spec: ModelSpec, plain: Mapping[str, Any]) -> tuple[str, ...]:
    for paths in SHARED_INPUT.get(spec.family, ()):
        for path in paths:
            if name.endswith(f".{path}"):
                block = name.removesuffix(path)
                group = tuple(block + one for one in paths)
                return group if all(one in plain for one in group) else (name,)
    return (name,)


def splits_of(module: nn.Module, name: str, width: int, spec: ModelSpec) -> tuple[tuple[int, bool], ...]:
    """(columns, comes out of a GELU) of each part of a layer's input."""
    parent, _, last = name.rpartition(".")
    if last == "2" and parent.endswith("net") and type(module.get_submodule(f"{parent}.0")).__name__ in GELU_CLASSES:
        return ((width, True),)
    for joined in JOINED.get(spec.family, ()):
        if name.endswith(f".{joined.layer}"):
            try:
                behind = module.get_submodule(name.removesuffix(joined.layer) + joined.behind)
            except AttributeError:
                continue
            gelu = getattr(behind, "out_features", width)
            if 0 < gelu < width:
                return ((width - gelu, False), (gelu, True))
    return ((width, False),)


def quantize_job(module: nn.Module, job: Job, recipe: Recipe, seen: Seen | None) -> tuple[dict[str, Layer], list[Any]]:
    """Quantize one job: a layer for every name, and the alphas taken.

    A part that should come out of a GELU but was seen below -SHIFT is quantized with sign.
    """
    linears: list[Any] = [module.get_submodule(name) for name in job.names]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    known = None if seen is None or not seen.count else seen
    signed = known is not None and known.least < -SHIFT and len(job.splits) == 1
    layer, alphas = quantize_layer(
        weight,
        None,
        recipe,
        None if known is None else known.absmax.to(weight.device),
        None if known is None else known.rows.to(weight.device),
        tuple((columns, gelu and not signed) for columns, gelu in job.splits),
    )
    rows = [int(linear.out_features) for linear in linears]
    layers = split_rows(layer.parts, rows)
    finished = {
        name: Layer(parts, corrected_bias(linear.bias, parts))
        for name, linear, parts in zip(job.names, linears, layers, strict=True)
    }
    return finished, list(alphas)


def split_rows(parts: tuple[Part, ...], rows: list[int]) -> list[tuple[Part, ...]]:
    """Parts of stacked layers -> the parts of each. Exact: rows are independent, s and D' belong to all of them."""
    if len(rows) == 1:
        return [parts]
    cut = [_rows_of(part, rows) for part in parts]
    return [tuple(pieces) for pieces in zip(*cut, strict=True)]


def _rows_of(part: Part, rows: list[int]) -> list[Part]:
    codes = part.codes
    packed, scales, up = codes.packed.split(rows), codes.scales.view(torch.uint8).split(rows), part.up.split(rows)
    channel = [None] * len(rows) if codes.channel is None else codes.channel.split(rows)
    return [
        Part(
            Codes(codes.precision, p.clone(), s.clone().view(codes.scales.dtype), None if c is None else c.clone(),
                  codes.columns),
            part.smooth, part.down, u.clone(), part.unsigned,
        )
        for p, s, c, u in zip(packed, scales, channel, up, strict=True)
    ]  # fmt: skip
