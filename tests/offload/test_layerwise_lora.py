"""LoRA on offloaded blocks: loaded, fused, switched and unloaded, always the bits of a twin without offload (C29)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from tests import fingerprint, tiny

peft = pytest.importorskip("peft")
ITEM = "offload.layerwise"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA files for the tiny FLUX."""
    from diffusers import FluxPipeline

    found = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("lora")
        model = tiny.build("flux").transformer
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            targets = ["to_q", "to_k", "proj_out", "x_embedder"]
            model.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        FluxPipeline.save_lora_weights(folder, transformer_lora_layers=peft.get_peft_model_state_dict(model))
        found.append(folder)
    return found


def load(number: int) -> Any:
    def act(pipe: Any, adapters: list[Path]) -> None:
        pipe.load_lora_weights(adapters[number], adapter_name=f"lora{number}")

    return act


STORY = [
    ("load", load(0)),
    ("weigh", lambda pipe, _: pipe.set_adapters("lora0", 0.5)),
    ("second", load(1)),
    ("both", lambda pipe, _: pipe.set_adapters(["lora0", "lora1"], [0.7, 0.4])),
    ("fuse", lambda pipe, _: pipe.fuse_lora()),
    ("unfuse", lambda pipe, _: pipe.unfuse_lora()),
    ("delete", lambda pipe, _: pipe.delete_adapters("lora0")),
    ("unload", lambda pipe, _: pipe.unload_lora_weights()),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_story_of_an_adapter(compiled: bool, adapters: list[Path], tmp_path: Path) -> None:
    """After every step of the story both pipelines draw the same; in the end no file of an adapter is left."""
    pipe, twin = tiny.build("flux"), tiny.build("flux")
    more = {"compile": True, "compile_backend": "eager"} if compiled else {}
    options = {"offload_resident_layers": 1, "offload_store": "disk", "offload_folder": str(tmp_path)}
    accelerate(pipe, preset=None, strict=True, offload="layerwise", **options, **more)
    first = tiny.run(pipe, "flux")
    assert torch.equal(first, tiny.run(twin, "flux"))
    drawn = [first]
    for name, act in STORY if not compiled else STORY[:3]:
        for one in (pipe, twin):
            act(one, adapters)
        expected = tiny.run(twin, "flux")
        assert torch.equal(tiny.run(pipe, "flux"), expected), name
        assert pipe.acceleration.report.stats[ITEM]["live_blocks_peak"] == 2, name
        drawn.append(expected)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(drawn) if a is not drawn[-1])
    if not compiled:
        assert len(list(tmp_path.glob("*/*.safetensors"))) == 4
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), drawn[-1]) and list(tmp_path.iterdir()) == []


def test_an_adapter_is_stored_beside_the_block(adapters: list[Path], tmp_path: Path) -> None:
    """Loading one writes its own weights, not the blocks' again; what it takes is moved and counted."""
    pipe = tiny.build("flux")
    options = {"offload_resident_layers": 1, "offload_store": "disk", "offload_folder": str(tmp_path)}
    accelerate(pipe, preset=None, strict=True, offload="layerwise", **options)
    tiny.run(pipe, "flux")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/*.safetensors")}
    moved = pipe.acceleration.report.stats[ITEM]["bytes_moved"]
    pipe.load_lora_weights(adapters[0])
    tiny.run(pipe, "flux")
    after = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/*.safetensors")}
    assert before.items() <= after.items() and len(after) == 8
    assert 0 < pipe.acceleration.report.stats[ITEM]["bytes_moved"] - moved < 0.5 * moved


def test_restored_with_an_adapter_on(adapters: list[Path], tmp_path: Path) -> None:
    """Restore between load and unload: the adapter stays, then goes, and nothing of either is left."""
    pipe, twin = tiny.build("flux"), tiny.build("flux")
    before = fingerprint.snapshot_pipe(pipe)
    options = {"offload_resident_layers": 1, "offload_store": "disk", "offload_folder": str(tmp_path)}
    accelerate(pipe, preset=None, strict=True, offload="layerwise", **options)
    for one in (pipe, twin):
        one.load_lora_weights(adapters[0])
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), tiny.run(twin, "flux"))
    for one in (pipe, twin):
        one.unload_lora_weights()
    assert torch.equal(tiny.run(pipe, "flux"), tiny.run(twin, "flux"))
    now = fingerprint.snapshot_pipe(pipe)
    assert now["orders"]["transformer"] == before["orders"]["transformer"]
