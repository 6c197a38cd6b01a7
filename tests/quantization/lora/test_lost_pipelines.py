"""LoRAs of a pipeline that went without `restore`, and what muting and deleting mean to diffusers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline

from diffaccel import accelerate, attach, restore
from tests import tiny
from tests.quantization.loras import state_dict


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"cache": "first_block"}, {"quantization": "fp8"}], ids=["alone", "cache", "fp8"]
)
def test_the_next_pipeline_on_the_same_denoiser_is_as_if_there_had_been_none(
    merge: bool, more: dict[str, Any]
) -> None:
    if merge and "quantization" in more:
        more = {"vae_tiling": "exact"}
    plain = tiny.run(tiny.build("flux"), "flux")
    lost = accelerate(tiny.build("flux"), None, **more)
    lost.acceleration.loras.load(state_dict(lost, "flux"), "x", merge=merge)
    assert not torch.equal(tiny.run(lost, "flux"), plain), "the negative control"
    parts = dict(lost.components)
    del lost
    gc.collect()
    found = FluxPipeline(**parts)
    found.set_progress_bar_config(disable=True)
    attach(found)
    assert torch.equal(tiny.run(found, "flux"), plain)
    found.enable_first_block_cache(threshold=0.1)
    assert torch.equal(tiny.run(restore(found), "flux"), plain)


SEQUENCES: dict[str, list[Callable[[Any, Any], Any]]] = {
    "off, load": [lambda p, b: p.disable_lora(), lambda p, b: p.load_lora_weights(b, adapter_name="b")],
    "off, load, choose both": [
        lambda p, b: p.disable_lora(),
        lambda p, b: p.load_lora_weights(b, adapter_name="b"),
        lambda p, b: p.set_adapters(["a", "b"]),
    ],
    "off, load, on": [
        lambda p, b: p.disable_lora(),
        lambda p, b: p.load_lora_weights(b, adapter_name="b"),
        lambda p, b: p.enable_lora(),
    ],
    "load, delete the new one": [
        lambda p, b: p.load_lora_weights(b, adapter_name="b"),
        lambda p, b: p.delete_adapters("b"),
    ],
    "choose the old one, delete it": [
        lambda p, b: p.load_lora_weights(b, adapter_name="b"),
        lambda p, b: p.set_adapters("a"),
        lambda p, b: p.delete_adapters("a"),
    ],
    "off, delete": [
        lambda p, b: p.load_lora_weights(b, adapter_name="b"),
        lambda p, b: p.disable_lora(),
        lambda p, b: p.delete_adapters("b"),
    ],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_muting_and_deleting_mean_what_they_mean_to_diffusers(name: str) -> None:
    theirs, ours = tiny.build("flux"), attach(tiny.build("flux"))
    first, second = state_dict(theirs, "flux", seed=1), state_dict(theirs, "flux", seed=2)
    theirs.load_lora_weights(dict(first), adapter_name="a")
    ours.acceleration.loras.load(dict(first), "a")
    for step in SEQUENCES[name]:
        step(theirs, dict(second))
        step(ours, dict(second))
    assert ours.get_active_adapters() == theirs.get_active_adapters()
    expected = tiny.run(theirs, "flux")
    torch.testing.assert_close(tiny.run(ours, "flux"), expected, atol=1e-6 * float(expected.abs().max()), rtol=0)
