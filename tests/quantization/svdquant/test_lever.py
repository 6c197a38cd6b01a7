"""The lever on real pipelines: what it changes, what it leaves, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach, plan, restore
from diffaccel.errors import DiffaccelError, IncompatibleError, InvalidOptionError
from diffaccel.models.registry import lookup
from diffaccel.quantization.svdquant import SvdQuant
from diffaccel.quantization.svdquant.linear import SvdQuantLinear
from diffaccel.quantization.svdquant.math import Recipe
from diffaccel.quantization.svdquant.nunchaku_files import export_native
from diffaccel.quantization.svdquant.ptq import Settings, quantize_pipeline
from tests import tiny
from tests.fingerprint import assert_same, snapshot_pipe
from tests.quantization.svdquant import models

FAMILIES = ("flux", "wan", "sd3")


def latents(pipe: Any, family: str, **changes: Any) -> torch.Tensor:
    """The latents of one call: pictures are too coarse to see one wrong bit."""
    kwargs = tiny.call_kwargs(family) | {"output_type": "latent"} | changes
    with torch.no_grad():
        out = pipe(**kwargs)
    return (out.images if hasattr(out, "images") else out.frames).clone()


def layers(pipe: Any) -> list[SvdQuantLinear]:
    return [m for m in pipe.transformer.modules() if isinstance(m, SvdQuantLinear)]


def item(pipe: Any) -> Any:
    return next(i for i in pipe.acceleration.plan.items if i.name == "quantization.svdquant")


@pytest.mark.parametrize("family", FAMILIES)
def test_on_and_off_leaves_no_trace(family):
    pipe = tiny.build(family)
    plain = latents(pipe, family)
    before = snapshot_pipe(pipe)
    accelerate(pipe, preset=None, quantization="svdquant", quantization_rank=4)
    found = latents(pipe, family)
    stats = pipe.acceleration.report.stats["quantization.svdquant"]
    assert stats["layers"] == len(layers(pipe)) > 20 and stats["bytes"] < stats["bytes_before"] / 2
    assert (
        stats["backend"] == "torch"
        and "not calibrated" in item(pipe).reason
        and "memory, not time" in item(pipe).reason
    )
    assert not torch.equal(found, plain) and torch.equal(latents(pipe, family), found)
    assert float((found - plain).norm() / plain.norm()) < 0.5
    restore(pipe)
    assert torch.equal(latents(pipe, family), plain)
    assert_same(before, snapshot_pipe(pipe))


@pytest.mark.parametrize("family", FAMILIES)
def test_with_cache_and_compile_in_either_order(family):
    outputs = []
    for first in (True, False):
        pipe = attach(tiny.build(family))
        plain = latents(pipe, family)
        if first:
            pipe.enable_svdquant(rank=4)
        pipe.enable_first_block_cache(threshold=1e9, min_steps=0, last_steps=0).enable_compile(backend="eager")
        if not first:
            pipe.enable_svdquant(rank=4)
        outputs.append(latents(pipe, family))
        assert pipe.acceleration.report.hit_rate > 0
        assert pipe.acceleration.report.stats["compile"]["graph_breaks"] == 0
        assert torch.equal(latents(pipe, family), outputs[-1])  # twice in a row
        pipe.disable_quantization().disable_compile().disable_cache()
        assert torch.equal(latents(pipe, family), plain)
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_do_not_touch_each_other(family):
    """After an exception, and after another size and batch, a run is what a fresh pipeline gives."""

    def stop(*_: Any) -> Any:
        raise RuntimeError("stop")

    fresh = accelerate(tiny.build(family), preset=None, quantization="svdquant", quantization_rank=4)
    wanted = latents(fresh, family)
    pipe = accelerate(tiny.build(family), preset=None, quantization="svdquant", quantization_rank=4)
    with pytest.raises(RuntimeError, match="stop"):
        latents(pipe, family, callback_on_step_end=stop)
    latents(pipe, family, **{f"num_{'videos' if family == 'wan' else 'images'}_per_prompt": 2})
    assert torch.equal(latents(pipe, family), wanted)


@pytest.mark.parametrize("mode", ["host", "disk", "no"])
def test_where_the_originals_are(mode):
    pipe = attach(tiny.build("flux"))
    plain = latents(pipe, "flux")
    pipe.enable_svdquant(rank=4, keep_original=mode)
    latents(pipe, "flux")
    if mode == "no":
        with pytest.raises(IncompatibleError, match="load the pipeline anew"):
            pipe.disable_quantization()
        assert layers(pipe)
        return
    assert pipe.acceleration.report.stats["quantization.svdquant"]["originals"] == {mode: len(layers(pipe))}
    pipe.disable_quantization()
    assert torch.equal(latents(pipe, "flux"), plain)


def test_the_originals_can_be_read_again_from_the_source(tmp_path):
    tiny.build("flux").save_pretrained(tmp_path)
    from diffusers import FluxPipeline

    pipe = attach(FluxPipeline.from_pretrained(tmp_path))
    plain = latents(pipe, "flux")
    pipe.enable_svdquant(rank=4)
    latents(pipe, "flux")
    assert pipe.acceleration.report.stats["quantization.svdquant"]["originals"] == {"source": len(layers(pipe))}
    pipe.disable_quantization()
    assert torch.equal(latents(pipe, "flux"), plain)


def test_calibration_now_smooths_and_is_plain():
    pipe = tiny.build("flux")
    plain = latents(pipe, "flux")
    attach(pipe)
    size = (tiny.call_kwargs("flux")["width"], tiny.call_kwargs("flux")["height"])
    pipe.enable_svdquant(rank=4, calibration=("red ring", "disc"), calibration_steps=2, calibration_size=size)
    assert "calibrated on 2 prompts" in item(pipe).reason
    assert any(bool((layer.smooth_factor != 1).any()) for layer in layers(pipe))
    assert not any(m._forward_pre_hooks for m in pipe.transformer.modules())
    restore(pipe)
    assert torch.equal(latents(pipe, "flux"), plain)


def test_switching_schemes_keeps_the_bits():
    pipe = attach(tiny.build("flux"))
    plain = latents(pipe, "flux")
    pipe.enable_svdquant(rank=4).enable_fp8(scheme="weight_only").enable_svdquant(rank=8, precision="nvfp4")
    assert {layer.svdq.parts[0].precision for layer in layers(pipe)} == {"nvfp4"}
    restore(pipe)
    assert torch.equal(latents(pipe, "flux"), plain)


def test_a_checkpoint_is_put_on_as_it_was_made(tmp_path):
    pipe = tiny.build("flux")
    spec = lookup(pipe)
    quantize_pipeline(pipe, spec, tmp_path, Settings(Recipe(rank=4, alpha=(0.5,))))
    live = accelerate(
        tiny.build("flux"), preset=None, quantization="svdquant", quantization_rank=4, quantization_alpha=0.5
    )
    wanted = latents(live, "flux")
    accelerate(pipe, preset=None, quantization="svdquant", quantization_checkpoint=str(tmp_path))
    assert "uncalibrated checkpoint" in item(pipe).reason
    assert torch.equal(latents(pipe, "flux"), wanted)
    other = plan(tiny.build("wan"), None, quantization="svdquant", quantization_checkpoint=str(tmp_path))
    refused = next(i for i in other.items if i.name == "quantization.svdquant")
    assert refused.status == "refused" and "WanTransformer3DModel" in refused.reason


def test_a_file_in_nunchakus_layout_is_put_on(tmp_path):
    model = models.flux()
    path = tmp_path / "svdq.safetensors"
    made = models.quantized(model, "nunchaku")
    export_native(model, models.SPEC, made, path)
    pipe = tiny.build("flux")
    pipe.register_modules(transformer=model)
    with torch.no_grad():
        plain = model(**models.call()).sample
    accelerate(pipe, preset=None, quantization="svdquant", quantization_checkpoint=str(path))
    assert "nunchaku's layout" in item(pipe).reason and len(layers(pipe)) == len(made)
    with torch.no_grad():
        found = model(**models.call()).sample
    assert 0 < float((found - plain).norm() / plain.norm()) < 0.1
    restore(pipe)
    with torch.no_grad():
        assert torch.equal(model(**models.call()).sample, plain)


def test_a_failure_leaves_nothing_half_done(tmp_path, monkeypatch):
    from diffaccel.quantization.svdquant import config as lever

    pipe = attach(tiny.build("flux"))
    plain, before = latents(pipe, "flux"), list(pipe.transformer.state_dict())
    true, calls = lever.install, []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("full")
        return true(*args)

    monkeypatch.setattr(lever, "install", fail)
    for mode in ("host", "no"):
        calls.clear()
        with pytest.raises(MemoryError):
            pipe.enable_svdquant(rank=4, keep_original=mode)
        assert list(pipe.transformer.state_dict()) == before and not layers(pipe)
        assert torch.equal(latents(pipe, "flux"), plain)


def test_a_shared_transformer_is_quantized_once():
    one = tiny.build("flux")
    two = tiny.build("flux")
    two.register_modules(transformer=one.transformer)
    attach(one).enable_svdquant(rank=4)
    with pytest.raises(DiffaccelError, match="shared"):
        attach(two).enable_svdquant(rank=4)
    restore(one)
    attach(two).enable_svdquant(rank=4)
    assert layers(two)


def test_machines_are_told_what_is_used():
    reasons = {}
    for machine in ("cpu", "4090", "h100", "5090"):
        made = plan(tiny.build("flux"), None, hardware=machine, quantization="svdquant")
        reasons[machine] = next(i for i in made.items if i.name == "quantization.svdquant").reason
    assert "memory, not time" in reasons["cpu"] and "memory more than time" in reasons["4090"]
    assert "Hopper" in reasons["h100"] and "enable_fp8" in reasons["h100"]
    assert "nvfp4" in reasons["5090"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "int3"}, "int4"),
        ({"rank": -1}, "rank=-1"),
        ({"rank": True}, "rank=True"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": "grid"}, "search"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"keep_original": "ram"}, "keep_original='ram'"),
        ({"calibration_size": (64,)}, "calibration_size"),
        ({"checkpoint": "x", "calibration": ("a",)}, "calibration"),
        ({"keep": ("(",)}, "regular expression"),
        ({"first_blocks": -1}, "first_blocks=-1"),
    ],
)
def test_bad_options_are_errors_before_any_work(options, said):
    with pytest.raises(InvalidOptionError, match=said.replace("(", r"\(")):
        SvdQuant(**options)


def test_a_missing_checkpoint_raises_when_strict():
    pipe = attach(tiny.build("flux"))
    with pytest.raises(InvalidOptionError, match="no such file"):
        pipe.enable_svdquant(checkpoint="no/such/file.safetensors")
    with pytest.raises(IncompatibleError, match="needs a GPU"):
        pipe.enable_svdquant(backend="triton")
    assert not layers(pipe)
