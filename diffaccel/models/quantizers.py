"""What is known of libraries that quantize weights before we see them: their names, and where their layers keep state.

Data; the lookups below import none of these libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

# `quant_method` of a `quantization_config`, as diffusers and transformers name it, in words.
METHODS = {
    "auto-round": "AutoRound",
    "bfl": "Black Forest Labs' own format (bfl)",
    "bitsandbytes": "bitsandbytes",
    "gguf": "GGUF",
    "modelopt": "NVIDIA ModelOpt",
    "nunchaku_lite": "nunchaku-lite",
    "quanto": "optimum-quanto",
    "sdnq": "SDNQ",
    "torchao": "torchao",
}
# Where nothing says so (quantized by hand): package of a layer's class, or of its weight's class, in words.
PACKAGES = {
    "auto_round": "AutoRound",
    "bitsandbytes": "bitsandbytes",
    "diffusers.quantizers.bfl": METHODS["bfl"],
    "diffusers.quantizers.gguf": "GGUF",
    "diffusers.quantizers.nunchaku": "nunchaku-lite",
    "modelopt": "NVIDIA ModelOpt",
    "nunchaku": "nunchaku",
    "optimum.quanto": "optimum-quanto",
    "sdnq": "SDNQ",
    "torchao": "torchao",
}
# Tensors a layer or a weight computes with that are no parameters, by class: they move with it.
MOVES = {
    "bitsandbytes.nn.modules.Int8Params": ("CB", "SCB"),
    "bitsandbytes.nn.modules.Linear8bitLt": ("state.CB", "state.SCB"),  # handed over in the first forward
    "bitsandbytes.nn.modules.Params4bit": ("quant_state.absmax", "quant_state.state2.absmax"),
}
WITH_STATE = frozenset(kind.rpartition(".")[2] for kind in MOVES)  # their bare names, for a quick look
# The same, but small, and in part the library's own (one table of codes for all layers of a process): they stay in
# memory, and follow to another device as copies.
FOLLOWS = {
    "bitsandbytes.nn.modules.Params4bit": ("quant_state.code", "quant_state.offset", "quant_state.state2.code"),
}
OWNED = {"bitsandbytes.nn.modules.Params4bit": ("module",)}  # attributes that refer back to the layer
LITE = frozenset({"qweight", "wscales", "proj_down", "proj_up"})  # parameters of nunchaku-lite's layer
CONSTANTS = (int, float, str, Enum, type(None), torch.dtype, torch.device)


def class_name(value: object) -> str:
    """The class of an object with its module; of our own subclasses, that of the class they stand for."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def quantized_by(model: torch.nn.Module) -> tuple[str, str]:
    """Who quantized a model before it came here: (in words, the first layer where only a layer tells); ("", "")."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if config is not None:
        method = getattr(config, "quant_method", None)
        name = str(getattr(method, "value", method))
        return METHODS.get(name, name) + _details(model, name, config), ""
    for path, layer in model.named_modules():
        found = _package(layer) or ("nunchaku-lite" if set(layer._parameters) >= LITE else "")
        weight = layer._parameters.get("weight")
        if not found and type(weight) not in (torch.nn.Parameter, type(None)):
            found = _package(weight)
        if found:
            return found, path
    return "", ""


def _details(model: torch.nn.Module, method: str, config: Any) -> str:
    """What users call it: the kind of a GGUF file, the bits of bitsandbytes."""
    if method == "gguf":
        kinds = (getattr(parameter, "quant_type", None) for parameter in model.parameters())
        return f" ({', '.join(sorted({kind.name for kind in kinds if isinstance(kind, Enum)}))})"
    if method == "bitsandbytes":
        return " (4-bit)" if getattr(config, "load_in_4bit", False) else " (8-bit)"
    return ""


def _package(value: object) -> str:
    module = type(value).__module__
    return next((words for name, words in PACKAGES.items() if module == name or module.startswith(f"{name}.")), "")


def moving_state(owner: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `MOVES` that this layer or weight holds, with their names."""
    for path in MOVES.get(class_name(owner), ()):
        tensor = _at(owner, path)
        if isinstance(tensor, torch.Tensor):
            yield path, tensor


def following_state(owner: object) -> Iterator[tuple[object, str, torch.Tensor]]:
    """The tensors of `FOLLOWS`: (the object that holds it, its attribute there, the tensor)."""
    for path in FOLLOWS.get(class_name(owner), ()):
        above, _, name = path.rpartition(".")
        holder = _at(owner, above)
        tensor = vars(holder).get(name) if hasattr(holder, "__dict__") else None
        if isinstance(tensor, torch.Tensor):
            yield holder, name, tensor


def unknown_state(tensor: torch.Tensor) -> str:
    """An attribute of a weight that is neither a constant nor state known here, or ""."""
    kind = class_name(tensor)
    known = {path.partition(".")[0] for table in (MOVES, FOLLOWS, OWNED) for path in table.get(kind, ())}
    return next((key for key, value in vars(tensor).items() if key not in known and not _constant(value)), "")


def _constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_constant, value))
    return isinstance(value, CONSTANTS)


def _at(owner: object, path: str) -> Any:
    for name in path.split("."):
        owner = vars(owner).get(name) if hasattr(owner, "__dict__") else None
    return owner
