"""Rows of docs/loading.md: control networks, adapters and reference pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.caching import controls
from tests.loaded.row import RUN, Row, Says


def _build(name: str) -> Callable[[], Any]:
    return lambda: controls.build(name)


def _run(name: str) -> Callable[..., torch.Tensor]:
    """Decoded, as the exact VAE is a column, too; true guidance is on where there is a call for it."""

    def run(pipe: Any, true_cfg: bool = False) -> torch.Tensor:
        return controls.run(pipe, name, output_type="pt")

    return run


def _row(title: str, name: str, family: str, **cells: Says) -> Row:
    return Row(title, _build(name), cells, family, _run(name))


NETWORK = Says("acts on blocks from outside; caches of the whole output act")
U_NET = "its denoiser is a U-Net without a stack of transformer blocks"
DEEP = {
    "compile": Says(f"{U_NET}; there are no blocks to compile one by one"),
    "layerwise": Says(f"{U_NET}; there are no blocks to take turns"),
}
ROWS = (
    _row("ControlNet, FLUX.1", "flux_cfg", "flux", first_block=NETWORK),
    _row(
        "ControlNet Union, FLUX.1",
        "flux_union",
        "flux",
        first_block=NETWORK,
        guidance=Says("this call ran without an unconditional branch", RUN),
    ),
    _row("ControlNet, SD3", "sd3", "sd3", first_block=NETWORK),
    _row("ControlNet, SDXL", "sdxl", "sdxl", first_block=NETWORK, **DEEP),
    _row("ControlNet, Qwen-Image", "qwen", "flux", first_block=NETWORK),
    _row("T2I-Adapter, SDXL", "sdxl_adapter", "sdxl", first_block=NETWORK, **DEEP),
    _row("IP-Adapter, FLUX.1", "flux_reference", "flux"),
    _row("VACE, Wan", "vace", "wan", first_block=NETWORK),
    _row("Kontext, FLUX.1", "kontext", "flux"),
    _row("Fill, FLUX.1", "fill", "flux", guidance=Says("takes no negative prompt")),
    _row("Edit, Qwen-Image", "edit", "flux"),
)
