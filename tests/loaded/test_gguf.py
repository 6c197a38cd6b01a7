"""GGUF transformers: what moves, what acts together, and what on top of them is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach, plan, restore
from diffaccel.attention.sparse.registry import make_method
from diffaccel.errors import DiffaccelError, IncompatibleError
from tests import tiny
from tests.invariants.stacks import COMPILE
from tests.loaded import quantizers
from tests.loaded.columns import FREE
from tests.loaded.state import changes, state_of
from tests.offload.offloads import ITEM, evicted
from tests.quantization.loras import state_dict

pytest.importorskip("gguf")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def offloaded(pipe: Any, folder: Path, **more: Any) -> Any:
    options = {"offload_store": "disk", "offload_resident_layers": 1, "offload_folder": str(folder)}
    return accelerate(pipe, None, strict=True, offload="layerwise", **options, **more)


@linux
def test_bytes_in_memory_are_those_predicted(tmp_path: Path) -> None:
    """Seen from outside: at every block, the bytes of all blocks that do not lie in a file; within 5 %."""
    pipe = quantizers.gguf()
    plain, before = tiny.run(pipe, "flux"), state_of(pipe)
    offloaded(pipe, tmp_path, offload_prefetch=0)
    predicted = pipe.acceleration.plan.item(ITEM).predicted["resident_bytes"]
    blocks, seen = tiny.blocks(pipe.transformer), []

    def look(*_: Any) -> None:
        near = [block for block in blocks if not evicted(block, tmp_path)]
        seen.append(sum(p.nbytes for block in near for p in block.parameters()))

    hooks = [block.attn.register_forward_pre_hook(look) for block in blocks]
    assert tiny.run(pipe, "flux").equal(plain)
    for hook in hooks:
        hook.remove()
    assert abs(max(seen) - predicted) <= 0.05 * predicted
    assert max(seen) < 0.6 * sum(p.nbytes for block in blocks for p in block.parameters())
    assert abs(pipe.acceleration.report.stats[ITEM]["live_bytes_peak"] - predicted) <= 0.05 * predicted
    assert sum(evicted(block, tmp_path) for block in blocks) == len(blocks)
    weight = pipe.transformer.transformer_blocks[1].attn.to_q.weight
    assert type(weight).__name__ == "GGUFParameter" and weight.quant_type.name == "Q8_0"
    restore(pipe)
    assert changes(before, state_of(pipe)) == []


def test_a_file_larger_than_the_card(tmp_path: Path) -> None:
    """Offload, compile and a cache at once: the picture of the cache alone, half the blocks moved, nothing compiled
    again."""
    cache = {"cache": "schedule", "cache_steps": [0, 2, 4], **FREE}
    pipe = quantizers.gguf(tiny.build("wan"))
    plain = tiny.run(pipe, "wan")
    truth = tiny.run(accelerate(pipe, None, strict=True, **cache), "wan")
    offloaded(restore(pipe), tmp_path, **COMPILE, **cache)
    tiny.run(pipe, "wan")
    picture, stats = tiny.run(pipe, "wan"), pipe.acceleration.report.stats
    torch.testing.assert_close(picture, truth, atol=1e-5, rtol=1e-4)
    assert not picture.equal(plain)
    assert stats["compile"] == {"graphs_compiled": 0, "graph_breaks": 0}
    assert stats[ITEM]["blocks_moved"] == 3 * 2 * 3  # of six steps three are computed, in two branches of three blocks
    assert tiny.run(restore(pipe), "wan").equal(plain)


def test_sparse_attention_acts_on_a_video_model() -> None:
    pipe = quantizers.gguf(tiny.build("wan"))
    plain = tiny.run(pipe, "wan")
    method = make_method("topk", block=2, density=0.5)
    accelerate(pipe, None, strict=True, attention="custom", attention_method=method)
    assert not tiny.run(pipe, "wan").equal(plain)
    assert pipe.acceleration.report.stats["attention.custom"]["calls"]["sparse"] > 0
    assert tiny.run(restore(pipe), "wan").equal(plain)


def test_a_lora_is_what_diffusers_makes_of_it() -> None:
    state = state_dict(tiny.build("flux"), "flux")
    theirs = quantizers.gguf()
    theirs.load_lora_weights(dict(state), adapter_name="a")
    theirs.set_adapters("a", 0.5)
    ours = attach(quantizers.gguf())
    ours.acceleration.loras.load(state, "a", 0.5, merge=True)  # into codes nothing can be merged
    assert {row.how for row in ours.acceleration.loras.report} == {"branch"}
    torch.testing.assert_close(tiny.run(ours, "flux"), tiny.run(theirs, "flux"), atol=1e-5, rtol=1e-4)


def test_a_dora_needs_values_and_says_so() -> None:
    """The bytes of a GGUF weight are no values, though a tensor of them can be "dequantized"."""
    state = state_dict(tiny.build("flux"), "flux")
    for key in [key for key in state if key.endswith("lora_B.weight")]:
        state[key.replace("lora_B.weight", "lora_magnitude_vector.weight")] = torch.ones(state[key].shape[0])
    pipe = quantizers.gguf()
    plain = tiny.run(pipe, "flux")
    with pytest.raises(DiffaccelError, match="needs the values of its weight, which GGUFParameter does not give"):
        attach(pipe).acceleration.loras.load(state, "a")
    assert tiny.run(restore(pipe), "flux").equal(plain)


def test_there_is_no_quantization_of_ours_to_take_off() -> None:
    with pytest.raises(IncompatibleError, match="was loaded quantized"):
        attach(quantizers.gguf()).disable_quantization()


@pytest.mark.parametrize("name", ["fp8", "int8", "svdquant"])
def test_a_file_that_quantizes_half_of_the_layers_is_refused_too(name: str) -> None:
    pipe = quantizers.gguf(left_out=("attn", "ff"))
    reason = plan(pipe, None, quantization=name).item(f"quantization.{name}").reason
    assert reason.startswith("transformer: the weights are quantized already, by GGUF (Q8_0)")
