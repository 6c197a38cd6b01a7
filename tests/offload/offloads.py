"""Shared by the tests of layerwise offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffaccel import accelerate
from tests import tiny

ITEM = "offload.layerwise"


def offloaded(pipe: Any, folder: Path, **more: Any) -> Any:
    """Accelerate with blocks on disk; parameters of the lever and other levers by keyword."""
    own = {"resident_layers": 1, "store": "disk", "folder": str(folder)}
    names = ("resident_layers", "prefetch", "store", "pin", "max_bytes", "folder", "device")
    own |= {name: more.pop(name) for name in names if name in more}
    given = {f"offload_{name}": value for name, value in own.items() if value is not None}
    return accelerate(pipe, preset=None, strict=True, offload="layerwise", **given, **more)


def stats(pipe: Any) -> dict[str, Any]:
    """What the last run moved."""
    return pipe.acceleration.report.stats[ITEM]


def files(folder: Path) -> list[Path]:
    """The stored weights."""
    return sorted(folder.glob("**/*.safetensors"))


def blocks_of(pipe: Any) -> list[torch.nn.Module]:
    return tiny.blocks(tiny.denoiser(pipe))


def evicted(block: torch.nn.Module, folder: Path) -> bool:
    """Do a block's weights lie in a file of this folder (as the system's table of mappings has it)?"""
    where = [p.data_ptr() for p in block.parameters()]
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line and ".safetensors" in line:
            begin, end = line.split()[0].split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return all(any(begin <= at < end for begin, end in ranges) for at in where)
