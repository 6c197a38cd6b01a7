"""Whole files in the layouts of others: nunchaku's own (FLUX.1 names, or diffusers' paths with fused projections) and
the folders that diffusers loads as "nunchaku_lite"."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ...errors import InvalidOptionError, UnsupportedModelError
from ...models.nunchaku import FUSED, NATIVE, Name
from ...models.spec import ModelSpec
from .formats import GROUP
from .jobs import split_rows, splits_of
from .math import Layer, Part
from .nunchaku import FIELDS, RAW, join_rows, pack_adaln, pack_part, unpack_adaln, unpack_part

DTYPE_NAMES = {"int4": "int4", "nvfp4": "fp4_e2m1_all"}
LITE = "nunchaku_lite"
_MARKS = (".lora_down", ".proj_down")  # every 4-bit layer has one of them


class NunchakuFile:
    """A file in nunchaku's layout, read layer by layer.

    Attributes:
        unsigned: int4 kernels read the layers behind a GELU without sign (native files; Lite never does).

    Raises:
        InvalidOptionError: no such file, or none with 4-bit layers in nunchaku's layout.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        lite = self.path.is_dir()
        if lite:
            self.path = self.path / "diffusion_pytorch_model.safetensors"
        if not self.path.is_file():
            raise InvalidOptionError(f"checkpoint={str(path)!r}: there is no such file")
        try:
            with safe_open(str(self.path), framework="pt") as file:
                self.metadata: dict[str, str] = dict(file.metadata() or {})
                self.names = list(file.keys())
        except SafetensorError as error:
            raise InvalidOptionError(f"checkpoint={str(path)!r}: not a safetensors file ({error})") from None
        self.prefixes = sorted({name.rpartition(".")[0] for name in self.names if name.endswith(_MARKS)})
        if not self.prefixes:
            raise InvalidOptionError(f"checkpoint={str(path)!r}: no 4-bit layers in nunchaku's layout")
        self.raw = any(name.endswith(".lora_down") for name in self.names)
        self.unsigned = not lite

    @staticmethod
    def is_one(path: str | Path) -> bool:
        """Does this path look like such a file (and not like one of ours)?"""
        where = Path(path)
        where = where / "diffusion_pytorch_model.safetensors" if where.is_dir() else where
        if not where.is_file():
            return False
        with safe_open(str(where), framework="pt") as file:
            return any(name.endswith(_MARKS) for name in file.keys())  # noqa: SIM118

    @property
    def config(self) -> dict[str, Any]:
        """The file's `quantization_config`: rank, weight.dtype, ... (empty where it says nothing)."""
        found: dict[str, Any] = json.loads(self.metadata.get("quantization_config", "{}"))
        return found

    def precision(self) -> str:
        """ "int4" or "nvfp4", by the scales of the first layer."""
        with safe_open(str(self.path), framework="pt") as file:
            kind = file.get_slice(f"{self.prefixes[0]}.wscales").get_dtype()
        return "nvfp4" if kind == "F8_E4M3" else "int4"

    def layers(self, module: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, Layer]]:
        """Every 4-bit layer by its name in the diffusers model `module` (which gives the shapes).

        Fused projections are taken apart by rows, which is exact. A layer whose input is split over two of the file's
        (FLUX.1's single `proj_out`) has two parts.

        Raises:
            UnsupportedModelError: a layer of the file is not in the model.
        """
        waiting: dict[str, dict[int, Part]] = {}
        biases: dict[str, torch.Tensor] = {}
        for prefix, name in self._order(spec):
            for layer, part, bias in self._unfused(module, spec, prefix, name):
                waiting.setdefault(layer, {})[name.part] = part
                if bias is not None:
                    biases[layer] = biases[layer] + bias if layer in biases else bias
                columns = sum(one.codes.columns for one in waiting[layer].values())
                if columns == _linear(module, layer).in_features:
                    parts = waiting.pop(layer)
                    yield layer, Layer(tuple(parts[i] for i in sorted(parts)), biases.pop(layer, None))

    def adaln(self, prefix: str, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight, bias) of an adaLN layer, as diffusers has them."""
        return unpack_adaln(self._tensors(prefix), splits)

    def _order(self, spec: ModelSpec) -> Iterator[tuple[str, Name]]:
        if self.raw:
            names = NATIVE.get(spec.family)
            if names is None:
                raise UnsupportedModelError(
                    f"{self.path.name} uses nunchaku's own layer names, which are known for {', '.join(NATIVE)} only"
                )
            for prefix in self.prefixes:
                stack, index, layer = prefix.split(".", 2)
                name = names.blocks[stack].quantized[layer]
                block = f"{stack}.{index}"
                full = tuple(f"{block}.{one}" for one in name.layers)
                yield prefix, Name(full, name.part, name.unsigned and self.unsigned)
            return
        for prefix in self.prefixes:
            parent, _, last = prefix.rpartition(".")
            layers = tuple(f"{parent}.{one}" for one in FUSED[last]) if last in FUSED else (prefix,)
            behind = prefix.endswith(".net.2") and self.unsigned
            yield prefix, Name(layers, 0, behind)

    def _unfused(
        self, module: nn.Module, spec: ModelSpec, prefix: str, name: Name
    ) -> Iterator[tuple[str, Part, torch.Tensor | None]]:
        linears = [_linear(module, layer) for layer in name.layers]
        rows = [linear.out_features for linear in linears]
        tensors = self._tensors(prefix)
        columns = linears[0].in_features
        if self.raw:
            columns = splits_of(module, name.layers[0], columns, spec)[name.part][0]
        part, bias = unpack_part(tensors, sum(rows), columns, name.unsigned)
        cut = [None] * len(rows) if bias is None else bias.split(rows)
        for layer, parts, its in zip(name.layers, split_rows((part,), rows), cut, strict=True):
            yield layer, parts[0], its

    def _tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        with safe_open(str(self.path), framework="pt") as file:
            wanted = (*FIELDS, *RAW.values(), "wzeros")
            return {w: file.get_tensor(f"{prefix}.{w}") for w in wanted if f"{prefix}.{w}" in set(self.names)}


def _linear(module: nn.Module, name: str) -> nn.Linear:
    try:
        return module.get_submodule(name)  # type: ignore[return-value]
    except AttributeError:
        raise UnsupportedModelError(f"{type(module).__name__} has no layer {name}, which the file holds") from None


def native_refusal(module: Any, spec: ModelSpec, layers: Collection[str]) -> str | None:
    """Why these layers of a model cannot be a file with nunchaku's own names, or None."""
    names = NATIVE.get(spec.family)
    if names is None:
        return f"nunchaku's own layer names are known for {', '.join(NATIVE)} only, and this is {spec.family}"
    known = set(layers)
    for stack, block in names.blocks.items():
        for index in range(len(getattr(module, stack))):
            for name in block.quantized.values():
                for layer in name.layers:
                    if f"{stack}.{index}.{layer}" not in known:
                        return f"it wants {stack}.{index}.{layer} in 4 bits, and the policy keeps that"
    return None


def lite_refusal(module: nn.Module, layers: Collection[str]) -> str | None:
    """Why none of these layers can be in a Lite folder, or None."""
    if any(not (_linear(module, n).in_features % 128 or _linear(module, n).out_features % 128) for n in layers):
        return None
    return "Lite needs layers whose features are multiples of 128, and this model has none"


def export_native(
    module: Any, spec: ModelSpec, layers: Mapping[str, Layer], path: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a denoiser as one file in nunchaku's layout: 4-bit layers, W4A16 adaLN, all else in 16 bits.

    Args:
        module: the original denoiser, for what is not in `layers` and for its config.
        layers: by name, quantized with layout="nunchaku".

    Raises:
        UnsupportedModelError: no names are known for this family, or a layer was kept that the layout wants in 4 bits.
        InvalidOptionError: the layers were quantized with another layout.
    """
    why = native_refusal(module, spec, layers)
    if why is not None:
        raise UnsupportedModelError(f"nunchaku's layout: {why}")
    names = NATIVE[spec.family]
    state = dict(module.state_dict())
    out: dict[str, torch.Tensor] = {}
    for stack, block in names.blocks.items():
        for index in range(len(getattr(module, stack))):
            start = f"{stack}.{index}"
            for label, name in block.quantized.items():
                for field, tensor in _native_layer(layers, start, name, dtype).items():
                    out[f"{start}.{label}.{RAW.get(field, field)}"] = tensor
            for label, splits in block.adaln.items():
                weight, bias = state[f"{start}.{label}.weight"], state[f"{start}.{label}.bias"]
                for field, tensor in pack_adaln(weight, bias, splits, dtype).items():
                    out[f"{start}.{label}.{field}"] = tensor
            for label, source in block.plain.items():
                out[f"{start}.{label}"] = state[f"{start}.{source}"].to(dtype)
    inside = tuple(f"{stack}." for stack in names.blocks)
    out |= {name: tensor.to(dtype) for name, tensor in state.items() if not name.startswith(inside)}
    first = next(iter(layers.values())).parts[0]
    metadata = {
        "model_class": names.model_class,
        "config": json.dumps(_config(module)),
        "quantization_config": json.dumps(quantization_config(first)),
    }
    _save(out, path, metadata)


def _native_layer(layers: Mapping[str, Layer], start: str, name: Name, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = join_rows([layers[f"{start}.{one}"] for one in name.layers])
    if name.part >= len(whole.parts):
        raise InvalidOptionError(
            f"{start}.{name.layers[0]}: its input is in one part: quantize with layout='nunchaku'"
        )
    part = whole.parts[name.part]
    if part.codes.precision == "int4" and part.unsigned != name.unsigned:
        raise InvalidOptionError(
            f"{start}.{name.layers[0]}: nunchaku reads it {'without' if name.unsigned else 'with'} sign, and it was "
            "quantized otherwise"
        )
    last = name.part == len(whole.parts) - 1  # where a layer is in two parts, the second has the bias
    return pack_part(part, whole.bias if last else None, dtype)


def quantization_config(part: Part) -> dict[str, Any]:
    """The `quantization_config` that nunchaku's loaders look at."""
    kind, group = DTYPE_NAMES[part.codes.precision], GROUP[part.codes.precision]
    scale = "fp8_e4m3_nan" if part.codes.precision == "nvfp4" else None
    return {
        "method": "svdquant",
        "rank": -(-part.rank // 16) * 16,
        "weight": {"dtype": kind, "scale_dtype": [None, scale] if scale else None, "group_size": group},
        "activation": {"dtype": kind, "scale_dtype": scale, "group_size": group},
    }


def export_lite(
    module: Any, layers: Mapping[str, Layer], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Write a denoiser as a folder that diffusers loads as "nunchaku_lite" (every layer by itself, none fused).

    Layers whose features are no multiples of 128 cannot be in this layout and are written in 16 bits.

    Returns:
        Names of the layers in 4 bits.

    Raises:
        InvalidOptionError: the layers were quantized with another layout than "lite".
    """
    why = lite_refusal(module, layers)
    if why is not None:
        raise UnsupportedModelError(why)
    out = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in module.state_dict().items()
    }
    targets, precision, rank = [], "", 0
    for name, layer in layers.items():
        if layer.in_features % 128 or layer.out_features % 128:
            continue
        part = layer.parts[0]
        if len(layer.parts) > 1 or part.unsigned:
            raise InvalidOptionError(
                f"{name}: Lite knows neither parts nor unsigned inputs: quantize with layout='lite'"
            )
        tensors = pack_part(part, layer.bias, dtype)
        del tensors["smooth_factor_orig"], out[f"{name}.weight"]
        if layer.bias is None:
            del tensors["bias"]
        if part.codes.precision == "nvfp4":
            tensors["wtscale"] = torch.ones(1, dtype=dtype)
        out |= {f"{name}.{field}": tensor for field, tensor in tensors.items()}
        targets.append(name)
        precision, rank = part.codes.precision, tensors["proj_up"].shape[1]
    svdq = {"precision": precision, "group_size": GROUP[precision], "rank": rank, "targets": targets}
    compute = str(dtype).removeprefix("torch.")
    config = {**_config(module), "_class_name": type(module).__name__}
    config["quantization_config"] = {"quant_method": LITE, "compute_dtype": compute, "svdq_w4a4": svdq}
    folder.mkdir(parents=True, exist_ok=True)
    _save(out, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return targets


def _config(module: Any) -> dict[str, Any]:
    return {k: v for k, v in dict(module.config).items() if not k.startswith("_") or k == "_class_name"}


def _save(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    save_file(
        {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, str(path), metadata=metadata
    )
