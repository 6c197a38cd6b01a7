"""From a LoRA file (or state dict) to pairs of matrices per layer; the file formats are diffusers' own to read."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)

from ...core.compat import unwrap_module
from ...errors import InvalidOptionError, UnsupportedModelError, unknown

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
SHOWN = 8  # keys of a list that an error names
LOADER_OPTIONS = (  # what diffusers' loaders read of the keywords of load_lora_weights
    "weight_name", "subfolder", "revision", "token", "cache_dir", "force_download", "proxies", "local_files_only",
    "use_safetensors", "unet_config",
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """What one adapter adds to one layer: scale * up @ down.

    Attributes:
        down: [r, in] for a linear layer, [r, in, kh, kw] for a convolution.
        up: [out, r], or [out, r, 1, 1].
        scale: alpha / r of the file (1 where it says nothing).
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """r."""
        return len(self.down)


Weights = Mapping[str, Mapping[str, Pair]]  # component -> path of the layer in it -> pair


def read(pipe: Any, source: Any, component: str | None = None, **options: Any) -> dict[str, dict[str, Pair]]:
    """Read an adapter with the pipeline's own loader and check every key against the pipeline's layers.

    Args:
        source: what `pipe.load_lora_weights` takes: a file, a folder, a hub name or a state dict.
        component: put the denoiser's layers into this one instead ("transformer_2" of Wan 2.2).
        **options: those of `pipe.load_lora_weights` (weight_name, subfolder, revision, ...).

    Raises:
        UnsupportedModelError: the pipeline has no LoRA loader, or the file is of a kind that is not low-rank pairs.
        InvalidOptionError: not a source, or a file that is not there; keys without a layer, or of another shape,
            with the list.
    """
    loader = getattr(type(pipe), "lora_state_dict", None)
    if loader is None:
        raise UnsupportedModelError(f"{type(pipe).__name__} has no LoRA loader in diffusers")
    _require_source(source)
    for option in options:
        if option not in LOADER_OPTIONS:
            raise unknown("option of load_lora_weights", option, LOADER_OPTIONS)
    options["return_lora_metadata"] = True
    if "return_alphas" in inspect.signature(loader).parameters:
        options["return_alphas"] = True
    found = loader(dict(source) if isinstance(source, Mapping) else source, **options)
    state, *rest = found if isinstance(found, tuple) else (found,)
    metadata = rest[-1] if rest else None
    alphas = rest[0] if len(rest) == 2 else None
    parts = _by_component(pipe, state)
    if component is not None:
        parts = {component if name in ("transformer", "unet") else name: part for name, part in parts.items()}
    problems: list[str] = []
    weights = {}
    for name, part in parts.items():
        module = getattr(pipe, name, None)
        if not isinstance(module, torch.nn.Module):
            problems.append(f"{name}: the pipeline has no such component ({len(part)} keys)")
            continue
        scales = _scales(name, metadata or {}, alphas or {})
        weights[name] = _pairs(name, unwrap_module(module), part, scales, problems)
    if problems:
        more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InvalidOptionError(
            f"{len(problems)} keys of the LoRA do not fit {type(pipe).__name__}: {'; '.join(problems[:SHOWN])}{more}. "
            "Nothing was applied"
        )
    if not any(weights.values()):
        raise InvalidOptionError("the LoRA holds no layers: are its names those of another model?")
    return weights


def _require_source(source: Any) -> None:
    """A missing file would be taken for the name of a repository on the hub."""
    if isinstance(source, Mapping):
        return
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise InvalidOptionError(f"source={source!r}: must be a file, a folder, a hub name or a state dict")
    path = os.path.expanduser(os.fspath(source))
    if not os.path.exists(path) and (os.path.isabs(path) or path.endswith(FILES)):
        raise InvalidOptionError(f"source={source!r}: there is no such file")


def _by_component(pipe: Any, state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """State dicts with peft's names, per component."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    known = set(getattr(pipe, "_lora_loadable_modules", ())) | {"transformer", "unet"}
    for key, value in state.items():
        prefix, _, name = key.partition(".")
        if prefix not in known:  # a file of the denoiser alone
            prefix, name = ("unet" if hasattr(pipe, "unet") else "transformer"), key
        parts.setdefault(prefix, {})[name] = value
    for name, part in parts.items():
        if any(".lora_A." in key for key in part):
            continue
        if name.startswith("text_encoder"):
            parts[name] = convert_state_dict_to_peft(convert_state_dict_to_diffusers(part))
        else:
            parts[name] = convert_unet_state_dict_to_peft(part)
    return parts


def _scales(component: str, metadata: Mapping[str, Any], alphas: Mapping[str, Any]) -> Any:
    """(path, rank) -> alpha / r, from the alphas of the file or its metadata."""
    own = {key.removeprefix(f"{component}."): value for key, value in metadata.items() if key.startswith(component)}
    named = {}
    for key, value in alphas.items():
        if key.startswith(f"{component}."):
            path = key.removeprefix(f"{component}.").removesuffix(".alpha").split(".lora_A.")[0].split(".lora.")[0]
            named[path] = float(value)

    def scale(path: str, rank: int) -> float:
        if path in named:
            return named[path] / rank
        alpha = _pattern(own.get("alpha_pattern"), path, own.get("lora_alpha"))
        if alpha is None:
            return 1.0
        return float(alpha) / (math.sqrt(rank) if own.get("use_rslora") else rank)

    return scale


def _pattern(patterns: Mapping[str, Any] | None, path: str, otherwise: Any) -> Any:
    return next((v for key, v in (patterns or {}).items() if path == key or path.endswith(f".{key}")), otherwise)


def _pairs(
    component: str, module: torch.nn.Module, state: Mapping[str, torch.Tensor], scale: Any, problems: list[str]
) -> dict[str, Pair]:
    layers = dict(module.named_modules())
    flat = not hasattr(module, "text_model")  # newer text encoders have no such level, older files do
    pairs = {}
    for key, down in state.items():
        if key.endswith(UP):
            if key.removesuffix(UP) + DOWN not in state:
                problems.append(f"{component}.{key}: its other half is missing")
            continue
        if not key.endswith(DOWN):
            problems.append(f"{component}.{key}: not one of a low-rank pair")
            continue
        up = state.get(key.removesuffix(DOWN) + UP)
        path = key.removesuffix(DOWN)
        path = path.removeprefix("text_model.") if flat and component.startswith("text_encoder") else path
        layer = layers.get(path)
        why = "its other half is missing" if up is None else unfit(layer, down, up)
        if why is None and not (torch.isfinite(down).all() and torch.isfinite(up).all()):  # type: ignore[arg-type]
            why = "it holds numbers that are not finite"
        if why is not None:
            problems.append(f"{component}.{path}: {why}")
        else:
            assert up is not None
            pairs[path] = Pair(down, up, scale(path, len(down)))
    return pairs


def unfit(layer: torch.nn.Module | None, down: torch.Tensor, up: torch.Tensor) -> str | None:
    """Why a pair does not fit a layer, or None."""
    if layer is None:
        return "no such layer"
    if isinstance(layer, torch.nn.Linear):
        wanted = (down.shape[0], layer.in_features), (layer.out_features, down.shape[0])
    elif isinstance(layer, torch.nn.Conv2d):
        inner = (down.shape[0], layer.in_channels // layer.groups, *layer.kernel_size)
        wanted = inner, (layer.out_channels, down.shape[0], 1, 1)  # type: ignore[assignment]
    else:
        return f"it is a {type(layer).__name__}, no linear layer or convolution"
    given = tuple(down.shape), tuple(up.shape)
    return (
        None if given == wanted else f"shapes {given[0]} and {given[1]}, the layer takes {wanted[0]} and {wanted[1]}"
    )
