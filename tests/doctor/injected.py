"""Faults put into real pipelines, one function each: what the doctor is to name, and the pipeline that has it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import HookRegistry
from diffusers.utils.peft_utils import scale_lora_layers

from diffaccel import accelerate, testbed
from diffaccel.ledger.live.memory import PeakMemory
from diffaccel.quantization.weights import holds_scaled
from tests import tiny
from tests.models.families import table
from tests.quantization.loras import state_dict


@dataclass(frozen=True)
class Case:
    """A pipeline with a fault, its call, and what else the doctor is told."""

    pipe: Any
    call: dict[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)


def call_of(family: str, steps: int = 4, **more: Any) -> dict[str, Any]:
    """A tiny call without its generator."""
    call = tiny.call_kwargs(family, num_inference_steps=steps, **more)
    return {key: value for key, value in call.items() if key != "generator"}


class Limited(PeakMemory):
    """A device of few bytes: raises as CUDA's allocator does."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live_bytes > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.live_bytes} bytes")
        return result


def limited(pipe: Any, most: int) -> Any:
    """The decoder's forward has so many bytes for what it computes."""
    decoder = pipe.vae.decoder
    plain = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with Limited(most):
            return plain(*args, **kwargs)

    decoder.forward = forward
    return pipe


def vae_out_of_memory() -> Case:
    return Case(limited(tiny.build("flux"), 2000), call_of("flux"))


def vae_too_large_for_the_device() -> Case:
    """By arithmetic alone: the weights fit, and what a decode needs does not."""
    pipe = tiny.build("flux")
    return Case(pipe, call_of("flux", height=64, width=64), {"memory_gib": 0.0009})


def overflow_in_8_bits() -> Case:
    """diffusers' layerwise casting stores 1e5 in 8 bits, whose largest number is 57344."""
    pipe = tiny.build("flux")
    with torch.no_grad():
        pipe.transformer.transformer_blocks[1].ff.net[2].weight[0, 0] = 1e5
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e5m2, compute_dtype=torch.float32)
    return Case(pipe, call_of("flux"))


def colours_moved() -> Case:
    """While the weights are in 8 bits, pictures are redder."""
    pipe = accelerate(tiny.build("sd3"), None, quantization="fp8", quantization_scheme="weight_only")
    transformer = pipe.transformer

    def shift(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        red = torch.tensor([0.3, 0.0, 0.0]).view(3, 1, 1)
        return output + red if holds_scaled(transformer) else output

    pipe.vae.decoder.register_forward_hook(shift)
    return Case(pipe, call_of("sd3"))


def nothing_to_see() -> Case:
    pipe = tiny.build("flux")
    with torch.no_grad():
        pipe.vae.decoder.conv_out.weight.zero_()
        pipe.vae.decoder.conv_out.bias.fill_(-3.0)
    return Case(pipe, call_of("flux"))


def cache_too_greedy() -> Case:
    """On a trained model: pictures of random weights hardly depend on the step."""
    pipe = testbed.load("scenes")
    pipe.set_progress_bar_config(disable=True)
    accelerate(pipe, None, cache="first_block", cache_threshold=1e9, cache_min_steps=0, cache_last_steps=0)
    prompt = testbed.prompts("test", 1, kind="scenes")
    return Case(pipe, {"prompt": prompt, "num_inference_steps": 10, **testbed.call_kwargs("scenes")})


def graphs_for_every_size() -> Case:
    torch._dynamo.reset()
    pipe = tiny.build("sd3")
    pipe.transformer.transformer_blocks[0].compile(backend="eager", dynamic=False)
    return Case(pipe, call_of("sd3", 1))


def graphs_for_every_call() -> Case:
    """A number that changes with every call is a constant of the graph."""
    torch._dynamo.reset()
    pipe = tiny.build("sd3")
    block = pipe.transformer.transformer_blocks[0]
    plain, block.count = block.forward, 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        block.count += 1
        text, picture = plain(*args, **kwargs)
        return text, picture + 0.0 * block.count

    block.forward = forward
    block.compile(backend="eager", dynamic=False)
    return Case(pipe, call_of("sd3", 1))


def lora_on_fused_layers() -> Case:
    """diffusers fuses to_q, to_k and to_v into a layer that knows nothing of the adapters on them."""
    pipe = tiny.build("flux")
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, module in pipe.transformer.named_modules():
        if name.endswith(("attn.to_q", "attn.to_v")) and isinstance(module, torch.nn.Linear):
            down, up = (
                torch.randn(s, generator=generator) for s in ((4, module.in_features), (module.out_features, 4))
            )
            weights[f"transformer.{name}.lora_A.weight"], weights[f"transformer.{name}.lora_B.weight"] = down, up
    pipe.load_lora_weights(weights, adapter_name="style")
    pipe.transformer.fuse_qkv_projections()
    return Case(pipe, call_of("flux"))


def lora_left_scaled() -> Case:
    """What a run that raised leaves: the scale of the call stays on the layers of one half."""
    pipe = tiny.build("flux")
    pipe.load_lora_weights(state_dict(pipe, "flux"), adapter_name="style")
    scale_lora_layers(pipe.transformer.single_transformer_blocks, 0.5)
    return Case(pipe, call_of("flux"))


def lora_loaded_twice() -> Case:
    pipe = tiny.build("flux")
    for name in ("one", "other"):
        pipe.load_lora_weights(state_dict(pipe, "flux"), adapter_name=name)
    pipe.set_adapters(["one", "other"])
    return Case(pipe, call_of("flux"))


def lora_not_as_in_its_file() -> Case:
    pipe = tiny.build("flux")
    weights = state_dict(pipe, "flux")
    pipe.load_lora_weights(dict(weights), adapter_name="style")
    pipe.set_adapters(["style"], [0.25])
    return Case(pipe, call_of("flux"), {"lora_files": {"style": weights}})


def prompt_too_long() -> Case:
    return Case(tiny.build("wan"), call_of("wan", prompt="a red ring that nobody reads to the end", num_frames=1))


def seams_in_time() -> Case:
    pipe = table.build("ltx")
    call = table.FAMILIES["ltx"].call() | {"num_inference_steps": 2, "num_frames": 33}
    pipe.vae.use_framewise_decoding = True
    pipe.vae.tile_sample_min_num_frames = pipe.vae.tile_sample_stride_num_frames = 16
    latents = torch.randn(1, 8, 1, 8, 8, generator=torch.Generator().manual_seed(1)).expand(-1, -1, 9, -1, -1)
    return Case(pipe, call | {"latents": pipe._pack_latents(latents.clone(), 1, 1)})


def backend_that_nothing_obeys() -> Case:
    """SD3's processors call SDPA themselves."""
    pipe = tiny.build("sd3")
    pipe.transformer.set_attention_backend("flex")
    return Case(pipe, call_of("sd3"))


def cache_with_too_few_steps() -> Case:
    return Case(accelerate(tiny.build("flux"), None, cache="first_block"), call_of("flux", 4))


def processors_replaced() -> Case:
    pipe = accelerate(tiny.build("sdxl"), None, attention="flex")
    pipe.enable_attention_slicing(1)
    return Case(pipe, call_of("sdxl"))


def originals_in_ram() -> Case:
    pipe = accelerate(tiny.build("flux"), None, quantization="fp8", quantization_keep_original="host")
    return Case(pipe, call_of("flux"), {"host_gib": 0.0005})


def plan_of_another_machine() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = accelerate(tiny.build("flux"), None, hardware="4090", attention="native")
    return Case(pipe, call_of("flux"))


def more_than_the_device_has() -> Case:
    return Case(accelerate(tiny.build("flux"), None, attention="native"), call_of("flux"), {"memory_gib": 1e-5})


# ---- diffusers' own accelerators, from public reports ---------------------------------------------------------------


def cache_cut_off() -> Case:
    """HookRegistry.remove_hook of a lower hook takes the upper one out of the chain."""
    pipe = tiny.build("flux")
    for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
        HookRegistry.check_if_exists_or_initialize(block).register_hook(_Nothing(), "below")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
        block._diffusers_hook.remove_hook("below", recurse=False)
    return Case(pipe, call_of("flux"))


def cache_left_dirty() -> Case:
    """diffusers resets its caches where a call ends, not where it raises."""
    pipe = tiny.build("flux")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))

    def stop(*_: Any) -> Any:
        raise RuntimeError("cancelled")

    with contextlib.suppress(RuntimeError):
        tiny.run(pipe, "flux", callback_on_step_end=stop)
    return Case(pipe, call_of("flux"))


def branches_mixed() -> Case:
    pipe = tiny.build("wan")
    config = PyramidAttentionBroadcastConfig(
        cross_attention_block_skip_range=2,
        cross_attention_timestep_skip_range=(0, 1000),
        cross_attention_block_identifiers=("blocks",),
        current_timestep_callback=lambda: 500,
    )
    pipe.transformer.enable_cache(config)
    return Case(pipe, call_of("wan", num_frames=1))


def backend_moved() -> Case:
    """Choosing it for one model chooses it for the process, and the reset does not move it back."""
    other = tiny.build("flux")
    other.transformer.set_attention_backend("flex")
    other.transformer.reset_attention_backend()
    return Case(tiny.build("flux"), call_of("flux"))


def casting_undone() -> Case:
    pipe = tiny.build("flux")
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    pipe.transformer.to(torch.bfloat16)
    return Case(pipe, call_of("flux"))


def tiles_of_another_size() -> Case:
    pipe = tiny.build("flux")
    pipe.vae.enable_tiling()
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 5, 5
    return Case(pipe, call_of("flux", height=12, width=12))


def run_that_raises() -> Case:
    pipe = tiny.build("flux")
    pipe.transformer.proj_out = torch.nn.Linear(7, 7)
    return Case(pipe, call_of("flux"))


class _Nothing(HookRegistry.__init__.__globals__["ModelHook"]):  # type: ignore[misc]
    """A hook of another library."""


TWELVE: dict[str, tuple[Callable[[], Case], ...]] = {
    "vae-oom": (vae_out_of_memory, vae_too_large_for_the_device),
    "not-finite": (overflow_in_8_bits,),
    "colour-shift": (colours_moved,),
    "flat-picture": (nothing_to_see,),
    "artefacts": (cache_too_greedy,),
    "recompile-storm": (graphs_for_every_size, graphs_for_every_call),
    "lora-no-effect": (lora_on_fused_layers,),
    "lora-wrong-scale": (lora_left_scaled, lora_loaded_twice, lora_not_as_in_its_file),
    "truncated-prompt": (prompt_too_long,),
    "temporal-seams": (seams_in_time,),
    "silent-fallback": (backend_that_nothing_obeys, cache_with_too_few_steps),
    "displaced-lever": (processors_replaced,),
    "host-memory": (originals_in_ram,),
    "wrong-machine": (plan_of_another_machine, more_than_the_device_has),
}
REPORTED: dict[str, tuple[Callable[[], Case], ...]] = {
    "cut-off-cache": (cache_cut_off,),
    "dirty-cache": (cache_left_dirty,),
    "mixed-branches": (branches_mixed,),
    "moved-backend": (backend_moved,),
    "casting-undone": (casting_undone,),
    "decode-size": (tiles_of_another_size,),
    "crash": (run_that_raises,),
}
CASES = [(name, make) for table in (TWELVE, REPORTED) for name, makes in table.items() for make in makes]
# What else is rightly named in a case.
BESIDE: dict[str, tuple[str, ...]] = {
    "backend_that_nothing_obeys": ("moved-backend",),
    "casting_undone": ("crash",),
}
