"""Rows of docs/loading.md: weights in high precision, and weights that others quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests import tiny
from tests.loaded import authors, quantizers
from tests.loaded.row import LIBRARY, Row, Says


def refused(library: str) -> dict[str, Says]:
    """Our own quantization on top is refused by the library's name."""
    return dict.fromkeys(("fp8", "int8", "svdquant"), Says(f"the weights are quantized already, by {library}"))


def row(name: str, library: str, build: Callable[[], Any], save: str = "", **more: Any) -> Row:
    """A row on which everything acts but our own quantization (and saving, where the library cannot)."""
    cells = refused(library) | ({"save": Says(save, LIBRARY)} if save else {})
    return Row(name, build, cells, **more)


NOT_SERIALIZABLE = "The model is quantized with QuantizationMethod.GGUF and is not serializable"
NO_STORAGE = "Attempted to access the data pointer on an invalid python storage"
ON_A_CPU = (
    "diffusers asks for a GPU before it loads, so that this one check is left out here; all else is the library's own "
    "code for CPUs."
)
IN_PIECES = "blocks are compiled in pieces, as its layers break graphs; the report counts the breaks of the first run."
PACKED = (
    "on processors for which bitsandbytes packs 4-bit weights anew, a run after a save is another picture, with "
    "diffaccel or without it."
)
STAND_IN = (
    "its kernels need a GPU: a layer with the library's tensors, names and class name, computed by torch, stands in."
)
ROWS = (
    Row("`from_pretrained`", lambda: tiny.build("flux")),
    Row("one file in its authors' layout, `from_single_file`", authors.single_file, family="wan"),
    row("GGUF", "GGUF (Q8_0)", quantizers.gguf, NOT_SERIALIZABLE, needs=("gguf",), slow=False),
    row(
        "GGUF in 4 bits, computing in bfloat16",
        "GGUF (Q4_0)",
        lambda: quantizers.gguf(dtype=torch.bfloat16, form="Q4_0"),
        NOT_SERIALIZABLE,
        needs=("gguf",),
    ),
    row(
        "GGUF, some layers not quantized in the file",
        "GGUF (Q8_0)",
        lambda: quantizers.gguf(left_out=("attn",)),
        NOT_SERIALIZABLE,
        needs=("gguf",),
    ),
    row(
        "bitsandbytes 8-bit",
        "bitsandbytes (8-bit)",
        lambda: quantizers.bitsandbytes(8),
        needs=("bitsandbytes",),
        remark=f"{ON_A_CPU} Regional compile: {IN_PIECES}",
    ),
    row(
        "bitsandbytes 4-bit",
        "bitsandbytes (4-bit)",
        lambda: quantizers.bitsandbytes(4),
        needs=("bitsandbytes",),
        remark=f"{ON_A_CPU} `save_pretrained`: {PACKED}",
    ),
    row("torchao, `TorchAoConfig`", "torchao", quantizers.torchao),
    row(
        "torchao by hand, int8 weights",
        "torchao",
        lambda: quantizers.torchao_by_hand("Int8WeightOnlyConfig"),
        NO_STORAGE,
    ),
    row(
        "torchao by hand, int8",
        "torchao",
        lambda: quantizers.torchao_by_hand("Int8DynamicActivationInt8WeightConfig"),
        NO_STORAGE,
    ),
    row(
        "torchao by hand, fp8 weights",
        "torchao",
        lambda: quantizers.torchao_by_hand("Float8WeightOnlyConfig"),
        NO_STORAGE,
    ),
    row("quanto, `QuantoConfig`", "optimum-quanto", quantizers.quanto),
    row("quanto by hand, frozen", "optimum-quanto", quantizers.quanto_by_hand),
    row(
        "quanto by hand, not frozen",
        "optimum-quanto",
        lambda: quantizers.quanto_by_hand(frozen=False),
        remark=f"regional compile: {IN_PIECES}",
    ),
    row("ModelOpt by hand", "NVIDIA ModelOpt", quantizers.modelopt, needs=("modelopt",)),
    row("nunchaku-lite's layers", "nunchaku-lite", quantizers.nunchaku_lite, remark=STAND_IN),
)
