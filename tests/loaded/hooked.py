"""Rows of docs/loading.md: hooks of accelerate and diffusers that came before or after, device maps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests import tiny
from tests.loaded.row import LIBRARY, RAISES, RUN, Row, Says
from tests.loaded.wrapped import of

CPU = torch.device("cpu")


def mapped() -> Any:
    """`device_map="cpu"`: the pipeline says where its components were loaded, and nothing moves."""
    pipe = tiny.build("flux")
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        return type(pipe).from_pretrained(folder, device_map="cpu")


def model_offload(pipe: Any) -> Any:
    """What `enable_model_cpu_offload` puts on (it asks for a GPU itself)."""
    from accelerate import cpu_offload_with_hook

    hook = None
    for name in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        _, hook = cpu_offload_with_hook(getattr(pipe, name), "cpu", prev_module_hook=hook)
    return pipe


def sequential_offload(pipe: Any) -> Any:
    """What `enable_sequential_cpu_offload` puts on (it asks for a GPU itself)."""
    from accelerate import cpu_offload

    for name in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        cpu_offload(getattr(pipe, name), CPU, offload_buffers=True)
    return pipe


def hooks_off(pipe: Any) -> None:
    """Accelerate's own way."""
    from accelerate.hooks import remove_hook_from_submodules

    for name in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        remove_hook_from_submodules(getattr(pipe, name))


def group_offload(pipe: Any) -> Any:
    pipe.transformer.enable_group_offload(CPU, CPU, "block_level", num_blocks_per_group=1)
    return pipe


def casting(pipe: Any) -> Any:
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    return pipe


ACCELERATE = "accelerate's offload (enable_model_cpu_offload, enable_sequential_cpu_offload or a device_map)"
GROUP = "diffusers' group offload (enable_group_offload)"


def moved_by(who: str) -> dict[str, Says]:
    return {
        "layerwise": Says(f"{who}, on transformer, moves the same weights"),
        "stage": Says(f"is moved by {who} already"),
    }


def stands_down(who: str, **more: Says) -> dict[str, Says]:
    """Cells of an offload that comes later."""
    return {
        "stage": Says(f"offload.stage stood down: the pipeline is moved by {who}", RUN),
        "layerwise": Says(f"{who}, on transformer, was switched on while offload.layerwise is on", RAISES),
        **more,
    }


def later(name: str, after: Callable[[Any], Any], cells: Mapping[str, Says], **more: Any) -> Row:
    return Row(name, lambda: tiny.build("flux"), cells, after=after, **more)


HELD_GROUP = Says("diffusers' group offload holds the model's weights: quantize first, then offload")
CAST = Says("diffusers' layerwise casting stores the weights without scales: load the model without it")
AWAY = Says("is away: accelerate's offload")
HELD = Says("is away: accelerate's offload", RAISES)
TAKEN_OFF = (
    "where weights were changed, `restore` asks for accelerate's hooks to be taken off first (they hold the weights "
    "between calls), and is bit-exact after that."
)
NO_DATA = Says("Cannot copy out of meta tensor; no data!", LIBRARY)
THREE = ("fp8", "int8", "svdquant")
ROWS = (
    Row('`device_map="cpu"`', mapped),
    Row("model offload, before", of(model_offload), moved_by(ACCELERATE)),
    Row("sequential offload, before", of(sequential_offload),
        {**moved_by(ACCELERATE), **dict.fromkeys((*THREE, "lora"), AWAY), "save": NO_DATA},
        renewed=True),
    Row("group offload, before", of(group_offload), {**moved_by(GROUP), **dict.fromkeys(THREE, HELD_GROUP)}),
    Row("layerwise casting, before", of(casting), dict.fromkeys(THREE, CAST)),
    later("model offload, after", model_offload, stands_down(ACCELERATE)),
    later("sequential offload, after", sequential_offload, stands_down(ACCELERATE, save=NO_DATA, lora=HELD),
          off=hooks_off, renewed=True, remark=TAKEN_OFF),
    later("group offload, after", group_offload, stands_down(GROUP)),
    later("layerwise casting, after", casting, {}),
)  # fmt: skip
