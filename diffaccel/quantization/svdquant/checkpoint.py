"""Our own file of quantized layers: plain matrices in one safetensors file, everything else as JSON in its header.

Tensors of part i of a layer are named `COMPONENT.LAYER.i.FIELD`, with the fields of `math.Part` and `formats.Codes`
(codes, scales, channel, smooth, down, up); its bias (float32) is `COMPONENT.LAYER.bias`. docs/svdquant.md has the
table. Only quantized layers are in the file: everything else comes from the pipeline it is put on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import DiffaccelError, InvalidOptionError
from .formats import PRECISIONS, Codes
from .math import Layer, Part

FORMAT, VERSION = "diffaccel-svdquant", 1
HEADER = "diffaccel"  # key of the JSON text in the file's metadata


@dataclass
class Header:
    """What the file says of itself.

    Attributes:
        recipe: precision, rank, alpha, refine, ... as they were asked for.
        classes: component -> class name of the model.
        layers: component -> layer -> {"shape", "parts": [{"columns", "rank", "unsigned", "alpha"}], "bias",
            "error": relative error of the output on the calibration sample, or None}.
    """

    recipe: dict[str, Any]
    classes: dict[str, str]
    layers: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def text(self) -> str:
        """As JSON."""
        return json.dumps({"format": FORMAT, "version": VERSION, **vars(self)}, sort_keys=True)

    @property
    def precision(self) -> str:
        """ "int4" or "nvfp4"."""
        return str(self.recipe["precision"])


def tensors_of(prefix: str, layer: Layer) -> dict[str, torch.Tensor]:
    """A layer's tensors under their names in the file."""
    found: dict[str, torch.Tensor] = {}
    for index, part in enumerate(layer.parts):
        codes, start = part.codes, f"{prefix}.{index}"
        found[f"{start}.codes"], found[f"{start}.scales"] = codes.packed, codes.scales
        if codes.channel is not None:
            found[f"{start}.channel"] = codes.channel
        found |= {f"{start}.smooth": part.smooth, f"{start}.down": part.down, f"{start}.up": part.up}
    if layer.bias is not None:
        found[f"{prefix}.bias"] = layer.bias
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in found.items()}


def about(layer: Layer, alphas: list[Any], error: float | None) -> dict[str, Any]:
    """A layer's entry in the header."""
    parts = [
        {"columns": p.codes.columns, "rank": p.rank, "unsigned": p.unsigned, "alpha": a}
        for p, a in zip(layer.parts, alphas, strict=True)
    ]
    shape = [layer.out_features, layer.in_features]
    return {"shape": shape, "parts": parts, "bias": layer.bias is not None, "error": error}


def write(path: Path, tensors: dict[str, torch.Tensor], header: str) -> None:
    """Write a file so that it is either whole or not there."""
    half = path.with_name(path.name + ".half")
    save_file(tensors, str(half), metadata={HEADER: header})
    os.replace(half, path)


class Checkpoint:
    """A file of quantized layers, read layer by layer.

    Raises:
        InvalidOptionError: no such file, or not of this format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            self.path = self.path / "svdquant.safetensors"
        if not self.path.is_file():
            raise InvalidOptionError(f"checkpoint={str(path)!r}: there is no such file")
        try:
            with safe_open(str(self.path), framework="pt") as file:
                text = (file.metadata() or {}).get(HEADER)
        except SafetensorError as error:
            raise InvalidOptionError(f"checkpoint={str(path)!r}: not a safetensors file ({error})") from None
        if text is None:
            raise InvalidOptionError(
                f"checkpoint={str(path)!r}: not written by diffaccel (no {HEADER!r} in its metadata)"
            )
        found = json.loads(text)
        if found.pop("format", None) != FORMAT or found.pop("version", None) != VERSION:
            raise InvalidOptionError(f"checkpoint={str(path)!r}: not {FORMAT} version {VERSION}")
        self.header = Header(**found)
        if self.header.precision not in PRECISIONS:
            raise InvalidOptionError(f"checkpoint={str(path)!r}: unknown precision {self.header.precision!r}")

    def layers(self, component: str) -> Iterator[tuple[str, Layer]]:
        """The layers of a component, one at a time in memory."""
        with safe_open(str(self.path), framework="pt") as file:
            for name, entry in self.header.layers.get(component, {}).items():
                yield name, self._layer(file, f"{component}.{name}", entry)

    def _layer(self, file: Any, prefix: str, entry: Mapping[str, Any]) -> Layer:
        try:
            parts = [self._part(file, f"{prefix}.{i}", part) for i, part in enumerate(entry["parts"])]
            bias = file.get_tensor(f"{prefix}.bias") if entry["bias"] else None
        except SafetensorError as error:
            raise DiffaccelError(f"{self.path}: {prefix} is not whole ({error})") from None
        return Layer(tuple(parts), bias)

    def _part(self, file: Any, start: str, entry: Mapping[str, Any]) -> Part:
        get = {name: file.get_tensor(f"{start}.{name}") for name in ("codes", "scales", "smooth", "down", "up")}
        channel = file.get_tensor(f"{start}.channel") if self.header.precision == "nvfp4" else None
        codes = Codes(self.header.precision, get["codes"], get["scales"], channel, int(entry["columns"]))
        return Part(codes, get["smooth"], get["down"], get["up"], bool(entry["unsigned"]))
