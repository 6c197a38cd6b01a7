"""An accelerated pipeline is still the diffusers pipeline that it was: name, type, files, signatures."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline, FluxImg2ImgPipeline

from diffaccel import accelerate, attach, plan, restore
from diffaccel.errors import UnsupportedModelError
from tests import fingerprint, tiny

from .levers import (
    ATTENTION,
    BACKEND,
    CACHE_ITEM,
    CACHES,
    LEVERS,
    accelerated,
    cache_options,
    fresh,
    is_exact,
    item,
    lever_options,
    plain,
    put_on,
)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_name_type_and_components(family: str) -> None:
    """isinstance, class name, components and config are the original's; `to` returns the accelerated pipe."""
    pipe = tiny.build(family)
    original, components, config = type(pipe), dict(pipe.components), dict(pipe.config)
    assert put_on(pipe, family, "both") is pipe
    assert isinstance(pipe, original) and type(pipe).__name__ == original.__name__
    assert pipe.components.keys() == components.keys()
    assert all(pipe.components[name] is value for name, value in components.items())
    assert dict(pipe.config) == config
    assert pipe.to("cpu") is pipe and pipe.to(torch.float32) is pipe
    assert torch.equal(tiny.run(pipe, family), fresh(family, "both"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_signatures(family: str) -> None:
    """C25: inspect.signature of the call, of the denoiser and of its blocks is unchanged."""
    pipe = tiny.build(family)
    model = tiny.denoiser(pipe)
    watched = [pipe.__call__, model.forward, *(block.forward for block in tiny.blocks(model))]
    before = [inspect.signature(function) for function in watched]
    put_on(pipe, family, "both")
    after = [pipe.__call__, model.forward, *(block.forward for block in tiny.blocks(model))]
    assert [inspect.signature(function) for function in after] == before
    assert pipe.__call__.__doc__


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_save_and_load(family: str, tmp_path: Path) -> None:
    """What an accelerated pipeline saves is a plain pipeline of the diffusers class."""
    pipe = accelerated(family, "both")
    tiny.run(pipe, family)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == type(tiny.build(family)).__name__
    assert "diffaccel" not in json.dumps(index)
    for config in tmp_path.rglob("*.json"):
        if config.name in ("model_index.json", "config.json", "scheduler_config.json"):
            assert "diffaccel" not in config.read_text(), config
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    untouched = tiny.build(family)
    assert type(loaded) is type(untouched)
    for name, component in tiny.component_modules(untouched):
        expected, found = component.state_dict(), getattr(loaded, name).state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name
    # Loaded weights lie elsewhere in memory: even a plain save and load differs in the last bits.
    torch.testing.assert_close(tiny.run(loaded, family), plain(family), atol=1e-6, rtol=0)
    assert torch.equal(tiny.run(pipe, family), fresh(family, "both")), "saving does not disturb"


def test_from_pipe() -> None:
    """Pipelines made from an accelerated one are plain pipelines of the asked class on the same modules."""
    pipe = accelerated("flux", "cache")
    tiny.run(pipe, "flux")
    for made in (FluxImg2ImgPipeline.from_pipe(pipe), AutoPipelineForImage2Image.from_pipe(pipe)):
        made.set_progress_bar_config(disable=True)
        assert type(made) is FluxImg2ImgPipeline
        assert made.transformer is pipe.transformer
        assert torch.equal(tiny.run(made, "flux_img2img"), plain("flux_img2img"))
    original = type(tiny.build("flux"))
    again = original.from_pipe(pipe)
    again.set_progress_bar_config(disable=True)
    assert type(again) is original
    assert torch.equal(tiny.run(again, "flux"), plain("flux"))
    assert torch.equal(tiny.run(pipe, "flux"), fresh("flux"))


def test_pickle() -> None:
    """A pipeline that went through accelerate and restore pickles as before."""
    pipe = put_on(tiny.build("sdxl"), "sdxl", "attach")
    restore(pipe)
    again = pickle.loads(pickle.dumps(pipe.unet))
    assert again.state_dict().keys() == pipe.unet.state_dict().keys()


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_a_lever_does(family: str, lever: str) -> None:
    """Where a lever acts, the output changes; where it cannot, the bits are plain and the plan says why."""
    pipe = accelerated(family, lever)
    result = tiny.run(pipe, family)
    assert torch.equal(result, plain(family)) is is_exact(family, lever)
    options = lever_options(family, lever)
    items = pipe.acceleration.plan.items
    if "cache" in options:
        entry = item(pipe.acceleration.plan, CACHE_ITEM)
        assert entry.status == ("enabled" if family in CACHES else "skipped")
        assert entry.reason and entry.fidelity == "lossy" and entry.slot.lower() == "call"
    if "attention" in options:
        entry = item(pipe.acceleration.plan, "attention")
        assert entry.status == ("enabled" if family in ATTENTION else "skipped")
        assert entry.reason and entry.fidelity in ("exact", "equivalent")
        torch.testing.assert_close(result, fresh(family, "cache" if "cache" in options else "attach"))
    if not options:
        assert not [entry.name for entry in items if entry.status == "enabled"]
    assert str(pipe.acceleration)


def test_the_cache_on_a_unet_is_refused_by_name() -> None:
    """accelerate skips with a reason naming the family, verb and strict raise, nothing is half attached."""
    pipe = tiny.build("sdxl")
    tiny.run(pipe, "sdxl")
    before = fingerprint.snapshot_pipe(pipe)
    with pytest.raises(UnsupportedModelError, match=r"(?i)sdxl|stable.?diffusion.?xl|unet"):
        accelerate(pipe, preset=None, strict=True, **cache_options("sdxl"))
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    accelerate(pipe, preset=None, **cache_options("sdxl"))
    reason = item(pipe.acceleration.plan, CACHE_ITEM).reason.lower()
    assert any(name in reason for name in ("sdxl", "stablediffusionxl", "unet", "u-net")), reason
    attached = fingerprint.snapshot_pipe(pipe)
    with pytest.raises(UnsupportedModelError, match=r"(?i)sdxl|stable.?diffusion.?xl|unet"):
        pipe.enable_first_block_cache(threshold=0.1)
    fingerprint.assert_same(attached, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, "sdxl"), plain("sdxl"))


@pytest.mark.parametrize("lever", ["both", "attach"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_plan_touches_nothing(family: str, lever: str) -> None:
    """plan() decides what accelerate() decides and leaves no trace; accelerate(pipe, that plan) does it."""
    pipe = tiny.build(family)
    tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    decided = plan(pipe, preset=None, **lever_options(family, lever))
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    put_on(pipe, family, lever)

    def told(made: Any) -> list[tuple[str, str, str]]:
        return [(entry.name, entry.status, entry.reason) for entry in made.items]

    assert told(decided) == told(pipe.acceleration.plan)
    new = accelerate(tiny.build(family), decided)
    assert torch.equal(tiny.run(new, family), fresh(family, lever))


@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_the_chosen_backend_is_the_one_that_runs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the kernel's calls: with the backend on, every attention of the denoiser goes through it."""
    from diffusers.models import attention_dispatch

    calls = [0]
    kernel = attention_dispatch.flex_attention

    class Counting:
        """Stands in for the module that diffusers takes flex_attention from."""

        def __getattr__(self, name: str) -> Any:
            if name == "flex_attention":
                calls[0] += 1
            return getattr(kernel, name)

    monkeypatch.setattr(attention_dispatch, "flex_attention", Counting())
    pipe = attach(tiny.build(family))
    tiny.run(pipe, family)
    assert calls[0] == 0
    pipe.enable_attention(BACKEND)
    tiny.run(pipe, family)
    per_block = 2 if family == "wan" else 1  # self and cross attention
    branches = 2 if family == "wan" else 1
    assert calls[0] == tiny.STEPS * branches * per_block * len(tiny.blocks(pipe.transformer))
    pipe.disable_attention()
    tiny.run(pipe, family)
    assert calls[0] == tiny.STEPS * branches * per_block * len(tiny.blocks(pipe.transformer))
