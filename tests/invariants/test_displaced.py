"""What a user sets last wins: a lever whose place was taken since it was attached says so, and undo leaves that.

Each case switches a lever on, runs, then does by hand (with diffusers' or PyTorch's own verbs) what takes its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor, XFormersAttnProcessor
from torch import nn

from diffaccel import accelerate, restore
from tests import tiny


def slice_attention(pipe: Any) -> None:
    pipe.enable_attention_slicing(1)


def classic_processors(pipe: Any) -> None:
    pipe.unet.set_attn_processor(AttnProcessor())


def one_classic_processor(pipe: Any) -> None:
    name = next(iter(pipe.unet.attn_processors))
    pipe.unet.get_submodule(name.removesuffix(".processor")).set_processor(AttnProcessor())


def set_backend(pipe: Any) -> None:
    """As `set_attention_backend` does it, without the process-wide default that it moves as well."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    for module in pipe.transformer.modules():
        if hasattr(getattr(module, "processor", None), "_attention_backend"):
            module.processor._attention_backend = AttentionBackendName("_native_math")


def compile_blocks(pipe: Any) -> None:
    for block in pipe.transformer.blocks:
        block.compile(backend="eager")


def compile_one_block(pipe: Any) -> None:
    pipe.transformer.blocks[0].compile(backend="eager")


def compile_whole(pipe: Any) -> None:
    pipe.transformer.compile(backend="eager")


def other_layer(pipe: Any) -> None:
    attention = pipe.transformer.blocks[0].attn1
    old = attention.to_q
    torch.manual_seed(3)
    attention.to_q = nn.Linear(old.in_features, old.out_features)


def other_weight(pipe: Any) -> None:
    layer = pipe.transformer.blocks[0].ffn.net[2]
    torch.manual_seed(3)
    layer.weight = nn.Parameter(torch.randn(layer.out_features, layer.in_features))


def native_cache(pipe: Any) -> None:
    from diffusers.hooks import FirstBlockCacheConfig

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))


def tiling_on(pipe: Any) -> None:
    pipe.vae.enable_tiling()


def tiling_off(pipe: Any) -> None:
    pipe.vae.disable_tiling()


def other_tiles(pipe: Any) -> None:
    pipe.vae.tile_latent_min_size = 3


def cpu_offload(pipe: Any) -> None:
    from accelerate.hooks import CpuOffload, add_hook_to_module

    add_hook_to_module(pipe.transformer, CpuOffload("cpu"))


@dataclass(frozen=True)
class Case:
    """A lever (overrides), who takes its place, and what the note says of it."""

    family: str
    options: dict[str, Any]
    item: str
    take: Callable[[Any], None]
    says: str


FLEX = {"attention": "flex"}
SAGE = {"attention": "sage", "attention_variant": "reference"}
RADIAL = {"attention": "radial", "attention_dense_steps": 0, "attention_dense_layers": 0}
CACHE = {"cache": "first_block", "cache_threshold": 0.5, "cache_min_steps": 0}
INTERVAL = {"cache": "interval", "cache_min_steps": 0}
BLENDED = {"vae_tiling": "blended", "vae_tiling_tile_height": 4, "vae_tiling_tile_width": 4}
COMPILE = {"compile": True, "compile_backend": "eager"}

CASES = {
    "slicing": Case("sdxl", FLEX, "attention.flex", slice_attention, "SlicedAttnProcessor"),
    "slicing, 8 bits": Case("sdxl", SAGE, "attention.sage", slice_attention, "SlicedAttnProcessor"),
    "classic processor": Case("sdxl", FLEX, "attention.flex", classic_processors, "(AttnProcessor)"),
    "one layer": Case("sdxl", FLEX, "attention.flex", one_classic_processor, "1 of "),
    "backend": Case("flux", FLEX, "attention.flex", set_backend, "_native_math"),
    "backend, 8 bits": Case("flux", SAGE, "attention.sage", set_backend, "_native_math"),
    "backend, sparse": Case("wan", RADIAL, "attention.radial", set_backend, "_native_math"),
    "blocks compiled": Case("wan", COMPILE, "compile", compile_blocks, "3 of 3 blocks"),
    "one block compiled": Case("wan", COMPILE, "compile", compile_one_block, "1 of 3 blocks"),
    "compiled as a whole": Case("wan", COMPILE, "compile", compile_whole, "as a whole"),
    "layer, fp8": Case("wan", {"quantization": "fp8"}, "quantization.fp8", other_layer, "attn1.to_q"),
    "layer, int8": Case("wan", {"quantization": "int8"}, "quantization.int8", other_layer, "attn1.to_q"),
    "weight, fp8": Case("wan", {"quantization": "fp8"}, "quantization.fp8", other_weight, "ffn.net.2"),
    "layer, svdquant": Case("wan", {"quantization": "svdquant"}, "quantization.svdquant", other_layer, "attn1.to_q"),
    "cache": Case("flux", CACHE, "cache.first_block", native_cache, "FirstBlockCacheConfig"),
    "static cache": Case("flux", INTERVAL, "cache.interval", native_cache, "FirstBlockCacheConfig"),
    "tiling, exact": Case("flux", {"vae_tiling": "exact"}, "vae.tiling", tiling_on, "vae.enable_tiling()"),
    "tiling off, blended": Case("flux", BLENDED, "vae.tiling", tiling_off, "vae.disable_tiling()"),
    "tiles, blended": Case("flux", BLENDED, "vae.tiling", other_tiles, "tile_latent_min_size"),
    "offload": Case("wan", {"offload": "stage"}, "offload.stage", cpu_offload, "accelerate's offload"),
}


def reason(pipe: Any, item: str) -> str:
    return next(row.reason for row in pipe.acceleration.plan.items if row.name == item)


@pytest.mark.parametrize("name", CASES)
def test_the_report_says_who_took_a_levers_place(name: str) -> None:
    case = CASES[name]
    plain = tiny.build(case.family)
    pipe = accelerate(tiny.build(case.family), None, strict=True, **case.options)
    tiny.run(pipe, case.family)
    assert "stood down" not in " ".join(pipe.acceleration.report.notes) and "stands down" not in reason(
        pipe, case.item
    )
    case.take(plain)
    case.take(pipe)
    if case.item != "offload.stage":  # which asks at the next run
        assert reason(pipe, case.item).startswith("stands down: ") and case.says in reason(pipe, case.item)
    tiny.run(pipe, case.family)
    notes = [note for note in pipe.acceleration.report.notes if note.startswith(f"{case.item} stood down")]
    assert len(notes) == 1 and case.says in notes[0] and len(notes[0]) <= 300
    assert case.says in reason(pipe, case.item)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, case.family), tiny.run(plain, case.family)), "what was set last stays"
    settings = [{k: v for k, v in vars(one.vae).items() if "til" in k} for one in (pipe, plain)]
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    "name", ["slicing", "classic processor", "backend", "backend, sparse", "cache", "static cache"]
)
def test_what_was_set_last_computes(name: str) -> None:
    """Where all of attention was taken, the result is that of the plain pipeline with the same thing set."""
    case = CASES[name]
    plain = tiny.build(case.family)
    pipe = accelerate(tiny.build(case.family), None, **case.options)
    case.take(plain)
    case.take(pipe)
    assert torch.equal(tiny.run(pipe, case.family), tiny.run(plain, case.family))
    stats = pipe.acceleration.report.stats[case.item]
    assert not any(stats.get("calls", {}).values()) and not stats.get("hit_rate")
    restore(pipe)


def test_a_place_can_be_taken_back() -> None:
    pipe = accelerate(tiny.build("flux"), None, attention="flex")
    flex = tiny.run(pipe, "flux")
    calls = pipe.acceleration.report.stats["attention.flex"]["calls"]
    set_backend(pipe)
    tiny.run(pipe, "flux")
    assert not pipe.acceleration.report.stats["attention.flex"]["calls"]
    pipe.disable_attention()
    pipe.enable_attention("flex")
    assert torch.equal(tiny.run(pipe, "flux"), flex)
    assert pipe.acceleration.report.stats["attention.flex"]["calls"] == calls
    assert not pipe.acceleration.report.notes
    restore(pipe)
    sliced = accelerate(tiny.build("sdxl"), None, attention="flex")
    flex = tiny.run(sliced, "sdxl")
    sliced.enable_attention_slicing(1)
    tiny.run(sliced, "sdxl")
    sliced.disable_attention_slicing()
    assert torch.equal(tiny.run(sliced, "sdxl"), flex)
    assert not sliced.acceleration.report.notes
    restore(sliced)


def test_xformers_takes_the_place_too() -> None:
    """What enable_xformers_memory_efficient_attention sets; to run it, the package (for CUDA) would be needed."""
    pipe = accelerate(tiny.build("sdxl"), None, attention="flex")
    pipe.unet.set_attn_processor(XFormersAttnProcessor())
    assert "XFormersAttnProcessor" in reason(pipe, "attention.flex")
    restore(pipe)
    assert {type(processor) for processor in pipe.unet.attn_processors.values()} == {XFormersAttnProcessor}


def test_processors_that_are_set_again_after_undo_are_plain() -> None:
    pipe = tiny.build("sdxl")
    plain = tiny.run(pipe, "sdxl")
    accelerate(pipe, None, attention="flex")
    tiny.run(pipe, "sdxl")
    before = pipe.unet.attn_processors
    kinds = {name: type(processor).__mro__[1] for name, processor in before.items()}
    pipe.unet.set_attn_processor(AttnProcessor())
    restore(pipe)
    assert {name: type(processor) for name, processor in before.items()} == kinds
    pipe.unet.set_attn_processor(before)
    assert torch.equal(tiny.run(pipe, "sdxl"), plain)


@pytest.mark.parametrize("family", ["flux", "wan", "sd3", "sdxl"])
def test_fused_projections_are_no_other_place(family: str) -> None:
    """`fuse_qkv_projections` changes how q, k and v are made: attention itself stays ours."""
    pipe = accelerate(tiny.build(family), None, attention="flex")
    tiny.run(pipe, family)
    counted = copy.deepcopy(pipe.acceleration.report.stats["attention.flex"])
    tiny.denoiser(pipe).fuse_qkv_projections()
    tiny.run(pipe, family)
    assert pipe.acceleration.report.stats["attention.flex"] == counted and counted["calls"]["flex"] > 0
    assert not pipe.acceleration.report.notes
    restore(pipe)


def test_a_block_compiled_under_a_cache_runs_the_users_graph() -> None:
    """A cache's hook has taken our compiled block in; the user's newer one takes its place there."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    pipe = accelerate(tiny.build("wan"), None, **COMPILE, cache="first_block", cache_min_steps=0)
    expected = tiny.run(pipe, "wan")
    torch._dynamo.reset()
    for block in pipe.transformer.blocks:
        block.compile(backend=backend)
    compiled = [block._compiled_call_impl for block in pipe.transformer.blocks]
    assert torch.equal(tiny.run(pipe, "wan"), expected)
    assert graphs, "the user's backend was never asked"
    restore(pipe)
    assert [block._compiled_call_impl for block in pipe.transformer.blocks] == compiled


def test_slicing_that_was_on_before_is_said_when_planning() -> None:
    """The same thing the other way round: nothing to intercept is a reason, not a note."""
    pipe = tiny.build("sdxl")
    pipe.unet.set_attn_processor(SlicedAttnProcessor(1))
    item = accelerate(pipe, None, attention="flex").acceleration.plan.items[0]
    assert item.status == "skipped" and "SlicedAttnProcessor" in item.reason
    restore(pipe)
