"""The stores of text encoders' outputs see every change of what an encoder computes: LoRAs, their strengths and
scales, quantized weights, attributes of modules. Each run equals the same run without a store, in a later process
as well (a fresh pipeline with the same folder and nothing in memory)."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach
from tests import tiny
from tests.offload.stages import stats
from tests.quantization.lora.test_verbs import SCALE, full_state

FAMILIES = ("flux", "sd3", "sdxl")
Change = Callable[[Any, str], None]


def load(pipe: Any, family: str, strength: float = 1.0, merge: bool = False) -> None:
    pipe.acceleration.loras.load(full_state(tiny.build(family), family), "a", strength, merge=merge)


CHANGES: dict[str, Change] = {
    "nothing": lambda pipe, family: None,
    "LoRA": load,
    "weaker": lambda pipe, family: load(pipe, family, 0.4),
    "merged": lambda pipe, family: load(pipe, family, merge=True),
    "fp8": lambda pipe, family: pipe.enable_fp8(scheme="weight_only", text_encoders=True),
    "fp8 dynamic": lambda pipe, family: pipe.enable_fp8(scheme="dynamic", text_encoders=True),
    "int8": lambda pipe, family: pipe.enable_int8(scheme="weight_only", text_encoders=True),
}


def stored(family: str, folder: Path, memory: int = 0) -> Any:
    return accelerate(
        tiny.build(family), None, strict=True, offload="stage", offload_store="disk", offload_text_store=str(folder),
        offload_text_cache_bytes=memory,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_later_processes_with_other_weights_share_a_folder(family: str, tmp_path: Path) -> None:
    names = list(CHANGES) if family == "flux" else ["nothing", "LoRA", "weaker", "merged"]
    truths = {}
    for name in names:
        pipe = attach(tiny.build(family))
        CHANGES[name](pipe, family)
        truths[name] = tiny.run(pipe, family)
    for name in [*names, *reversed(names)]:  # the second time around, from the folder
        pipe = stored(family, tmp_path)
        CHANGES[name](pipe, family)
        assert torch.equal(tiny.run(pipe, family), truths[name]), name
    assert stats(pipe)["text_hits"] > 0 and stats(pipe)["text_misses"] == 0
    assert not torch.equal(truths["nothing"], truths["LoRA"]) and not torch.equal(truths["weaker"], truths["LoRA"])


@pytest.mark.parametrize("order", ["offload first", "LoRA first"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_of_text_encoders_and_offload_in_either_order(family: str, order: str, tmp_path: Path) -> None:
    plain, pipe = attach(tiny.build(family)), attach(tiny.build(family))
    base = tiny.run(plain, family)
    load(plain, family, 0.7)
    offload = {"store": "disk", "text_store": str(tmp_path), "text_cache_bytes": 10**6}
    for step in ("offload", "LoRA") if order == "offload first" else ("LoRA", "offload"):
        if step == "offload":
            pipe.enable_stage_offload(**offload)
            tiny.run(pipe, family)
        else:
            load(pipe, family, 0.7)
    for strength in (0.7, -0.3, 0.7):
        for each in (plain, pipe):
            each.set_adapters("a", strength)
        assert torch.equal(tiny.run(pipe, family), tiny.run(plain, family))
        scaled = {SCALE[family]: {"scale": 0.5}}
        assert torch.equal(tiny.run(pipe, family, **scaled), tiny.run(plain, family, **scaled))
    assert torch.equal(tiny.run(pipe, family), tiny.run(plain, family)) and stats(pipe)["text_hits"] > 0
    pipe.unload_lora_weights()
    assert torch.equal(tiny.run(pipe, family), base)
    pipe.disable_offload()
    assert torch.equal(tiny.run(pipe, family), base)


def _own_forward(encoder: torch.nn.Module) -> None:
    layer = [m for m in encoder.modules() if isinstance(m, torch.nn.Linear)][-1]
    layer.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), layer)


def _attribute(encoder: torch.nn.Module) -> None:
    """A tensor that is neither parameter nor buffer, in an object."""
    layer = [m for m in encoder.modules() if isinstance(m, torch.nn.Linear)][-1]
    layer.notes = types.SimpleNamespace(factor=torch.full((), 0.5))
    layer.forward = types.MethodType(lambda self, x: self.notes.factor * type(self).forward(self, x), layer)


@pytest.mark.parametrize("change", [_own_forward, _attribute])
def test_what_somebody_put_on_a_layer_is_seen(change: Callable[[torch.nn.Module], None], tmp_path: Path) -> None:
    twin = tiny.build("flux")
    change(twin.text_encoder_2)
    pipe = stored("flux", tmp_path, memory=10**6)
    before = tiny.run(pipe, "flux")
    change(pipe.text_encoder_2)
    assert torch.equal(tiny.run(pipe, "flux"), tiny.run(twin, "flux"))
    later = stored("flux", tmp_path)
    assert torch.equal(tiny.run(later, "flux"), before)
    assert not torch.equal(before, tiny.run(twin, "flux"))
