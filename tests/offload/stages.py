"""Shared by the tests of stage offload: the disk is the store, the CPU the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import accelerate
from tests import tiny

FAMILIES = ("flux", "wan", "wan22", "sd3", "flux_img2img")
ITEM = "offload.stage"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def staged(family: str = "flux", **options: Any) -> Any:
    """A fresh pipeline with stages on disk; a raised error where that cannot be."""
    parameters = {f"offload_{name}": value for name, value in options.items()}
    return accelerate(tiny.build(family), None, strict=True, offload="stage", **parameters)


def mapped_files() -> list[tuple[int, int]]:
    """Where files are mapped into this process: asked of the system, not of us."""
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[5].startswith("/"):
            low, high = fields[0].split("-")
            files.append((int(low, 16), int(high, 16)))
    return files


def away(module: torch.nn.Module, files: list[tuple[int, int]]) -> bool:
    """Do its weights lie in a mapped file? A first and a last one are asked; mixtures are an error."""
    tensors = [p for p in module.parameters() if p.numel()]
    found = {any(low <= p.data_ptr() < high for low, high in files) for p in (tensors[0], tensors[-1])}
    assert len(found) == 1, "half of a component is away"
    return found == {True}


def inside(pipe: Any) -> set[str]:
    """Names of the components that are in memory."""
    files = mapped_files()
    return {name for name, module in tiny.component_modules(pipe) if not away(module, files)}


def leaf(module: torch.nn.Module) -> torch.nn.Module:
    """The last module inside that has weights of its own (T5's first one is never called)."""
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None][-1]


def weights(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def watch(pipe: Any) -> list[tuple[str, set[str]]]:
    """(component, components in memory) at each of its calls, changes only."""
    seen: list[tuple[str, set[str]]] = []

    def at(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            entry = (name, inside(pipe))
            if not seen or seen[-1] != entry:
                seen.append(entry)

        return hook

    for name, module in tiny.component_modules(pipe):
        for part in (
            (getattr(module, "encoder", None), getattr(module, "decoder", None)) if name == "vae" else (module,)
        ):
            assert part is not None
            leaf(part).register_forward_hook(at(name))
    return seen


def stats(pipe: Any) -> dict[str, Any]:
    """What the last run measured."""
    found: dict[str, Any] = pipe.acceleration.report.stats[ITEM]
    return found


def calls_of(module: torch.nn.Module) -> list[int]:
    """Counts the calls of a component, in a list of one."""
    count = [0]
    leaf(module).register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    return count
