"""What a newcomer ran into: kept handles, shallow copies, strict, misspelt plans, caches put on later."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from diffaccel import (
    DiffaccelError,
    InvalidOptionError,
    InvalidPipelineError,
    Plan,
    accelerate,
    load_quantized,
    plan,
    presets,
    restore,
)
from tests import tiny

CACHE: dict[str, Any] = {"cache": "first_block", "cache_threshold": 1e9, "cache_min_steps": 0}


def test_a_kept_handle_is_dead_after_restore() -> None:
    pipe, taken = tiny.build("flux"), []
    plain = tiny.run(pipe, "flux")
    accelerate(pipe, None, **CACHE)

    def pause(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            taken.append(handle.snapshot())
        return tensors

    handle = pipe.acceleration
    tiny.run(pipe, "flux", callback_on_step_end=pause)
    restore(pipe)
    for use in (lambda: handle.resume(taken[0]), lambda: handle.run().__enter__()):
        with pytest.raises(DiffaccelError, match="was restored"):
            use()
    assert torch.equal(tiny.run(pipe, "flux"), plain)
    accelerate(pipe, None, **CACHE)
    assert pipe.acceleration is not handle
    restore(pipe)


def test_a_shallow_copy_neither_revives_nor_undoes() -> None:
    pipe = tiny.build("flux")
    plain = tiny.run(pipe, "flux")
    accelerate(pipe, None, **CACHE)
    cached = tiny.run(pipe, "flux")
    clone = copy.copy(pipe)
    restore(clone)
    assert torch.equal(tiny.run(pipe, "flux"), cached) and not torch.equal(cached, plain)
    clone = copy.copy(pipe)
    restore(pipe)
    assert torch.equal(tiny.run(clone, "flux"), plain)
    accelerate(pipe, None, **CACHE)
    assert torch.equal(tiny.run(pipe, "flux"), cached)
    restore(pipe)


def test_strict_is_content_with_what_is_so_already() -> None:
    pipe = tiny.build("flux")
    accelerate(pipe, "cpu-demo", strict=True)
    assert pipe.acceleration.plan.item("attention.auto").status == "skipped"
    pipe.enable_attention()
    restore(pipe)
    with pytest.raises(InvalidOptionError, match="strict"):
        accelerate(pipe, None, strict="yes")  # type: ignore[arg-type]


def test_a_misspelt_item_of_a_plan_is_refused() -> None:
    pipe = tiny.build("flux")
    text = plan(pipe, "cpu-demo").to_toml().replace("cache.adaptive", "cache.adaptiv")
    with pytest.raises(InvalidOptionError, match="adaptive"):
        accelerate(pipe, Plan.from_toml(text))
    with pytest.raises(InvalidOptionError, match="must be text"):
        Plan.from_toml(None)  # type: ignore[arg-type]


def test_a_diffusers_cache_put_on_later_is_said() -> None:
    pipe = accelerate(tiny.build("flux"), None)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.6))
    tiny.run(pipe, "flux")
    assert any("diffusers' own cache is on transformer" in note for note in pipe.acceleration.report.notes)
    pipe.transformer.disable_cache()
    restore(pipe)


def test_arguments_of_the_wrong_kind(tmp_path: pathlib.Path) -> None:
    pipe = tiny.build("flux")
    path = tmp_path / "mine.toml"
    path.write_text('[wishes]\ncache = "first_block"\n')
    assert plan(pipe, path).enabled == ("cache.first_block",)  # type: ignore[arg-type]
    for bad in (None, "flux", pipe.transformer):
        with pytest.raises(InvalidPipelineError, match="diffusers pipeline"):
            restore(bad)
    with pytest.raises(InvalidOptionError, match="preset"):
        presets(3)  # type: ignore[arg-type]


def test_a_plan_in_a_file_is_a_preset(tmp_path: pathlib.Path) -> None:
    pipe = tiny.build("flux")
    path = tmp_path / "plan.toml"
    path.write_text(plan(pipe, "cpu-demo", cache_tolerance=0.33).to_toml())
    assert plan(pipe, str(path)).item("cache.adaptive").params["tolerance"] == 0.33


def _lora(pipe: Any) -> dict[str, torch.Tensor]:
    layer, draw = "transformer_blocks.0.attn.to_q", torch.Generator().manual_seed(0)
    module = pipe.transformer.get_submodule(layer)
    return {
        f"transformer.{layer}.lora_A.weight": torch.randn(4, module.in_features, generator=draw),
        f"transformer.{layer}.lora_B.weight": torch.randn(module.out_features, 4, generator=draw),
    }


def test_kept_loras_are_dead_after_restore() -> None:
    pipe = tiny.build("flux")
    plain = tiny.run(pipe, "flux")
    loras = accelerate(pipe, None).acceleration.loras
    loras.load(_lora(pipe), "style")
    assert not torch.equal(tiny.run(pipe, "flux"), plain)
    restore(pipe)
    for use in (lambda: loras.load(_lora(pipe), "other"), lambda: loras.set({"style": 0.5}), loras.unload):
        with pytest.raises(DiffaccelError, match="was restored"):
            use()
    assert torch.equal(tiny.run(pipe, "flux"), plain)
    restore(accelerate(pipe, None))  # no hook of the dead handle is in the way


def test_loras_of_the_wrong_kind(tmp_path: pathlib.Path) -> None:
    pipe = accelerate(tiny.build("flux"), None)
    loras, state = pipe.acceleration.loras, _lora(pipe)
    for name in (3, "", ["style"]):
        with pytest.raises(InvalidOptionError, match="name="):
            loras.load(state, name)
    for source in (None, 3, "", tmp_path / "none.safetensors", "none.safetensors"):
        with pytest.raises(InvalidOptionError, match="source="):
            loras.load(source)
    for layers in (3, [3]):
        with pytest.raises(InvalidOptionError, match="layers="):
            loras.load(state, layers=layers)
    for strengths in (None, 3, ["style"]):
        with pytest.raises(InvalidOptionError, match="strengths="):
            loras.set(strengths)
    with pytest.raises(InvalidOptionError, match="name="):
        loras.unload(3)
    assert loras.adapters == ()


def test_a_plan_with_a_lora_says_that_no_file_holds_it() -> None:
    pipe = accelerate(tiny.build("flux"), None)
    pipe.acceleration.loras.load(_lora(pipe), "style")
    with pytest.raises(InvalidOptionError, match="LoRA") as caught:
        pipe.acceleration.plan.to_toml()
    assert "tensor" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"offload": "layerwise", "offload_store": "disk", "offload_device": "meta"}, "offload_device"),
        ({"offload": "stage", "offload_store": "disk", "offload_device": "meta"}, "offload_device"),
        ({"offload": "stage", "offload_store": "disk", "offload_keep": 3}, "offload_keep"),
        ({"quantization": "svdquant", "quantization_calibration": [1]}, "calibration="),
        ({"quantization": "svdquant", "quantization_calibration": 3}, "calibration="),
        ({"quantization": "svdquant", "quantization_calibration_size": 8}, "calibration_size"),
        ({"attention": "sage", "attention_variant": 1}, "variant=1: must be text"),
    ],
)
def test_option_values_of_the_wrong_type(options: dict[str, Any], named: str) -> None:
    pipe = tiny.build("flux")
    with pytest.raises(InvalidOptionError, match=named):
        accelerate(pipe, None, **options)
    assert not hasattr(pipe, "acceleration")


def test_exact_is_yes_or_no() -> None:
    pipe = accelerate(tiny.build("flux"), None)
    for exact in ("no", 1, None):
        with pytest.raises(InvalidOptionError, match="exact="):
            pipe.enable_vae_tiling(exact=exact)
    assert pipe.acceleration.plan.enabled == ()


def test_load_quantized_wants_a_path() -> None:
    for path in (None, 3):
        with pytest.raises(InvalidOptionError, match="path="):
            load_quantized(path)  # type: ignore[arg-type]
