"""What the user switched off stays off: no rule and no later verb puts it on again, on any processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from tests import tiny

LATER: dict[str, Callable[[Any], Any]] = {
    "enable_first_block_cache": lambda pipe: pipe.enable_first_block_cache(threshold=0.2),
    "disable_cache": lambda pipe: pipe.disable_cache(),
    "enable_attention": lambda pipe: pipe.enable_attention("native"),
    "disable_attention": lambda pipe: pipe.disable_attention(),
    "enable_guidance_cache": lambda pipe: pipe.enable_guidance_cache(interval=2),
    "disable_guidance_cache": lambda pipe: pipe.disable_guidance_cache(),
    "enable_solver": lambda pipe: pipe.enable_solver(),
    "disable_solver": lambda pipe: pipe.disable_solver(),
    "disable_quantization": lambda pipe: pipe.disable_quantization(),
    "enable_int8": lambda pipe: pipe.enable_int8(),
}


def processor(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: units)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: units)


def names(pipe: Any) -> set[str]:
    """Places of the plan, on or not."""
    return {item.name.partition(".")[0] for item in pipe.acceleration.plan.items}


@pytest.mark.parametrize("units", [False, True], ids=["no INT8 units", "AMX"])
@pytest.mark.parametrize("wish", [{}, {"compile": False}, {"compile": None}], ids=str)
def test_int8_never_brings_compile_along(units: bool, wish: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The case that was found: compile=False, then disable_compile(), put compile on where there is AMX."""
    processor(monkeypatch, units)
    pipe = accelerate(tiny.build("flux"), None, quantization="int8", **wish)
    assert "compile" not in names(pipe)
    pipe.disable_compile()
    assert "compile" not in names(pipe)
    for verb, call in LATER.items():
        call(pipe)
        assert "compile" not in names(pipe), verb
        pipe.disable_compile()
        assert "compile" not in names(pipe), verb
    restore(pipe)


OFF: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "cache": ({"cache": "first_block"}, lambda pipe: pipe.disable_cache()),
    "attention": ({"attention": "native"}, lambda pipe: pipe.disable_attention()),
    "guidance": ({"guidance": "reuse"}, lambda pipe: pipe.disable_guidance_cache()),
    "solver": ({"solver": "abm"}, lambda pipe: pipe.disable_solver()),
    "quantization": ({"quantization": "int8"}, lambda pipe: pipe.disable_quantization()),
    "compile": ({"compile": True, "compile_backend": "eager"}, lambda pipe: pipe.disable_compile()),
    "offload": ({"offload": "layerwise", "offload_store": "disk"}, lambda pipe: pipe.disable_offload()),
    "vae": ({"vae_tiling": "exact"}, lambda pipe: pipe.disable_vae_tiling()),
}


@pytest.mark.parametrize("units", [False, True], ids=["no INT8 units", "AMX"])
@pytest.mark.parametrize("key", OFF)
def test_every_place_stays_off(key: str, units: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched on by `accelerate`, off by its verb: off after every verb of another place, and the verb again."""
    processor(monkeypatch, units)
    wishes, off = OFF[key]
    more = {"offload_folder": str(tmp_path)} if key == "offload" else {}
    pipe = accelerate(tiny.build("flux"), None, **wishes, **more)
    assert key in names(pipe), "the negative control: it was on"
    off(pipe)
    assert key not in names(pipe)
    for verb, call in LATER.items():
        before, ours = names(pipe), key in verb or (key == "cache" and "block" in verb)
        if ours or (key, verb) in {("quantization", "enable_int8"), ("guidance", "enable_guidance_cache")}:
            continue
        call(pipe)
        assert key not in names(pipe), (verb, before)
    off(pipe)
    assert key not in names(pipe)
    restore(pipe)


@pytest.mark.parametrize("units", [False, True], ids=["no INT8 units", "AMX"])
@pytest.mark.parametrize("value", [None, False])
def test_off_against_a_preset(value: Any, units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An override of None takes a preset's lever out, and later verbs leave it out."""
    processor(monkeypatch, units)
    pipe = accelerate(tiny.build("flux"), "cpu-demo", cache=None, compile=value)
    for verb in ("enable_attention", "enable_int8", "disable_attention", "disable_quantization"):
        LATER[verb](pipe)
        assert not {"cache", "compile"} & names(pipe), verb
    restore(pipe)
