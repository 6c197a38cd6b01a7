"""Bad input: each kind works or is refused in a sentence that names it, and nothing is left half attached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ConfigMixin, DiffusionPipeline, FirstBlockCacheConfig, MagCacheConfig, ModelMixin
from diffusers.configuration_utils import register_to_config

import diffaccel
from diffaccel import accelerate, attach, plan, restore
from diffaccel.errors import DiffaccelError, IncompatibleError, InvalidOptionError, UnsupportedModelError
from tests import fingerprint, tiny
from tests.invariants.levers import (
    CACHE_ITEM,
    REUSE_ALL,
    accelerated,
    at_step,
    cache_options,
    fresh,
    item,
    plain,
    put_on,
)

NOT_PIPELINES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a string": lambda: "black-forest-labs/FLUX.1-dev",
    "a dict": dict,
    "a class": lambda: DiffusionPipeline,
    "a transformer": lambda: tiny.build("flux").transformer,
    "a linear layer": lambda: torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("kind", NOT_PIPELINES)
@pytest.mark.parametrize("verb", ["accelerate", "attach", "plan"])
def test_not_a_pipeline(kind: str, verb: str) -> None:
    """Anything that is no diffusers pipeline is refused by its type's name."""
    thing = NOT_PIPELINES[kind]()
    if (verb, kind) == ("plan", "a string"):
        thing = 3  # a string may name a model of the ledger
    with pytest.raises((InvalidOptionError, UnsupportedModelError), match=type(thing).__name__):
        getattr(diffaccel, verb)(thing)


def test_restore_of_what_was_never_accelerated() -> None:
    """restore is a no-op on a pipeline that is not accelerated."""
    pipe = tiny.build("sd3")
    before = fingerprint.snapshot_pipe(pipe)
    assert restore(pipe) is pipe
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("preset", {"preset": "cpu-dmeo"}, "cpu-demo"),
    ("preset", {"preset": "losless"}, "lossless"),
    ("preset type", {"preset": 3}, "preset"),
    ("option", {"cache": "first_block", "cache_treshold": 0.1}, "cache_threshold"),
    ("option", {"atention": "native"}, "attention"),
    ("value", {"cache": "first_blok"}, "first_block"),
    ("value", {"attention": "natve"}, "native"),
    ("value", {"attention": 3}, "attention"),
    ("value", {"cache": True}, "cache"),
    ("threshold", {"cache": "first_block", "cache_threshold": -0.1}, "threshold"),
    ("threshold", {"cache": "first_block", "cache_threshold": "high"}, "threshold"),
    ("threshold", {"cache": "first_block", "cache_threshold": float("nan")}, "threshold"),
    ("min_steps", {"cache": "first_block", "cache_min_steps": -1}, "min_steps"),
    ("last_steps", {"cache": "first_block", "cache_last_steps": 1.5}, "last_steps"),
    ("parameter without its lever", {"cache_threshold": 0.1}, "cache"),
    ("budget", {"budget": 24}, "budget"),
    ("hardware", {"hardware": "4009"}, "4090"),
]


@pytest.mark.parametrize(("kind", "arguments", "hint"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_argument(kind: str, arguments: dict[str, Any], hint: str) -> None:
    """An unknown name or a bad value raises InvalidOptionError with the nearest name, touching nothing."""
    pipe = tiny.build("flux")
    before = fingerprint.snapshot_pipe(pipe)
    arguments = {"preset": None} | arguments
    for function in (accelerate, plan):
        with pytest.raises(InvalidOptionError, match=hint) as caught:
            function(pipe, **arguments)
        assert isinstance(caught.value, ValueError)
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_wrong_argument_of_a_verb() -> None:
    """Verbs check like accelerate, and keep what was on."""
    pipe = accelerated("flux", "cache")
    for verb, arguments, hint in [
        ("enable_first_block_cache", {"treshold": 0.1}, "threshold"),
        ("enable_first_block_cache", {"threshold": -1}, "threshold"),
        ("enable_attention", {"backend": "natve"}, "native"),
    ]:
        with pytest.raises(InvalidOptionError, match=hint):
            getattr(pipe, verb)(**arguments)
        assert torch.equal(tiny.run(pipe, "flux"), fresh("flux"))


@pytest.mark.parametrize("family", ["wan", "sd3", "sdxl"])
def test_preset_of_another_family(family: str, tmp_path: Path) -> None:
    """A preset made for FLUX, and a plan made for FLUX, are refused by the names of both families."""
    made = plan(tiny.build("flux"), preset=None, **cache_options("flux"))
    pipe = tiny.build(family)
    before = fingerprint.snapshot_pipe(pipe)
    for preset in ("cpu-demo", made):
        with pytest.raises(UnsupportedModelError, match="flux") as caught:
            accelerate(pipe, preset)
        assert type(pipe).__name__ in str(caught.value) or family in str(caught.value)
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("what", ["one block", "the transformer", "the text encoder"])
def test_half_on_meta(what: str) -> None:
    """Weights that were never loaded are refused with the component's name; nothing is touched."""
    pipe = tiny.build("flux")
    if what == "one block":
        pipe.transformer.single_transformer_blocks[1].to("meta")
    elif what == "the transformer":
        pipe.transformer.to("meta")
    else:
        pipe.text_encoder_2.to("meta")
    before = fingerprint.snapshot_pipe(pipe)
    name = "text_encoder_2" if what == "the text encoder" else "transformer"
    with pytest.raises(DiffaccelError, match=name) as caught:
        accelerate(pipe, preset=None, **cache_options("flux"))
    assert "meta" in str(caught.value)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


NATIVE = {
    "first block": lambda: FirstBlockCacheConfig(threshold=0.3),
    "mag": lambda: MagCacheConfig(
        threshold=0.5, max_skip_steps=2, retention_ratio=0.0, num_inference_steps=6, mag_ratios=[1.0] * 6
    ),
}


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_a_native_cache_is_on(family: str, kind: str) -> None:
    """diffusers' own cache and ours exclude each other, by name; the native one goes on working."""
    pipe = tiny.build(family)
    pipe.transformer.enable_cache(NATIVE[kind]())
    native = tiny.run(pipe, family)
    assert not torch.equal(native, plain(family))
    before = fingerprint.snapshot_pipe(pipe)
    name = type(NATIVE[kind]()).__name__

    with pytest.raises(IncompatibleError, match=name):
        accelerate(pipe, preset=None, strict=True, **cache_options(family))
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))

    accelerate(pipe, preset=None, **cache_options(family))
    entry = item(pipe.acceleration.plan, CACHE_ITEM)
    assert entry.status in ("refused", "skipped") and name in entry.reason
    assert torch.equal(tiny.run(pipe, family), native)
    with pytest.raises(IncompatibleError, match=name):
        pipe.enable_first_block_cache(threshold=0.1)
    assert torch.equal(tiny.run(pipe, family), native)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, family), native)
    pipe.transformer.disable_cache()
    assert torch.equal(tiny.run(pipe, family), plain(family))


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_a_native_cache_comes_later(family: str) -> None:
    """diffusers' cache switched on over ours: the run is refused by name, or one of the two acts alone."""
    pipe = accelerated(family, "cache")
    tiny.run(pipe, family)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=REUSE_ALL))
    twin = tiny.build(family)
    twin.transformer.enable_cache(FirstBlockCacheConfig(threshold=REUSE_ALL))
    try:
        result = tiny.run(pipe, family)
    except IncompatibleError as error:
        assert "FirstBlockCacheConfig" in str(error)
    else:
        assert torch.equal(result, fresh(family)) or torch.equal(result, tiny.run(twin, family))
    pipe.transformer.disable_cache()
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))


def test_device_map(tmp_path: Path) -> None:
    """A pipeline that came with a device map works as any other, or is refused by that name."""
    tiny.build("flux").save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path, device_map="cpu")
    loaded.set_progress_bar_config(disable=True)
    assert loaded.hf_device_map is not None
    reference = tiny.run(loaded, "flux")
    before = fingerprint.snapshot_pipe(loaded)
    try:
        put_on(loaded, "flux", "cache")
    except DiffaccelError as error:
        assert "device_map" in str(error)
    else:
        torch.testing.assert_close(tiny.run(loaded, "flux"), fresh("flux"), atol=1e-6, rtol=0)
        restore(loaded)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(loaded))
    assert torch.equal(tiny.run(loaded, "flux"), reference)


class Int8Linear(torch.nn.Module):
    """A stand-in for a quantized layer: integer weights as buffers, no parameters, no `weight`."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("quantized", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Dequantize and multiply."""
        return torch.nn.functional.linear(x, self.quantized.to(x.dtype) * self.scale, self.bias)


def quantize(pipe: Any) -> None:
    """Replace the linear layers of all blocks by the stand-in, and mark the model as diffusers does."""
    for block in tiny.blocks(pipe.transformer):
        for name, module in list(block.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent = block.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], Int8Linear(module))
    pipe.transformer.is_quantized = True


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_quantized_weights(family: str) -> None:
    """The cache on a model with quantized layers works, or is refused by name."""
    pipe = tiny.build(family)
    quantize(pipe)
    reference = tiny.run(pipe, family)
    before = fingerprint.snapshot_pipe(pipe)
    try:
        put_on(pipe, family, "cache", cache_threshold=0.0)
    except DiffaccelError as error:
        assert "quantiz" in str(error)
    else:
        assert torch.equal(tiny.run(pipe, family), reference)
        put_on(pipe, family, "cache", cache_threshold=REUSE_ALL)
        assert not torch.equal(tiny.run(pipe, family), reference)
        assert pipe.acceleration.report.hit_rate > 0.5
        restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, family), reference)


class Strange(ModelMixin, ConfigMixin):
    """A model nobody knows."""

    @register_to_config
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        return self.linear(x)  # type: ignore[no-any-return]


class Custom(DiffusionPipeline):
    """A user's own pipeline around a model nobody knows."""

    def __init__(self, transformer: torch.nn.Module, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, steps: int = 4) -> torch.Tensor:
        """A loop as users write it."""
        self.scheduler.set_timesteps(steps)
        x = torch.ones(1, 8)
        for t in self.scheduler.timesteps:
            x = self.scheduler.step(self.transformer(x), t, x, return_dict=False)[0]
        return x


def custom() -> Custom:
    """One of those."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Custom(Strange(), FlowMatchEulerDiscreteScheduler())


def test_an_unknown_model() -> None:
    """A model without a card: attach works, the cache is skipped and refused by the model's class name."""
    pipe = custom()
    reference = pipe()
    attach(pipe)
    assert torch.equal(pipe(), reference)
    assert [step.index for step in pipe.acceleration.report.steps] == [0, 1, 2, 3]
    accelerate(pipe, preset=None, cache="first_block")
    entry = item(pipe.acceleration.plan, CACHE_ITEM)
    assert entry.status == "skipped" and "Strange" in entry.reason
    with pytest.raises(UnsupportedModelError, match="Strange"):
        pipe.enable_first_block_cache()
    assert torch.equal(pipe(), reference)
    restore(pipe)
    assert type(pipe) is Custom and torch.equal(pipe(), reference)


@pytest.mark.parametrize("verb", ["accelerate", "restore", "enable", "disable"])
def test_a_change_inside_a_run(verb: str) -> None:
    """Attaching or undoing from a callback of the same pipeline is refused by name, and the run goes on."""
    acts: dict[str, Callable[[Any], Any]] = {
        "accelerate": lambda pipe: accelerate(pipe, preset=None),
        "restore": restore,
        "enable": lambda pipe: pipe.enable_first_block_cache(threshold=0.5),
        "disable": lambda pipe: pipe.disable_cache(),
    }
    pipe = accelerated("flux", "cache")
    seen = []

    def act(_: Any) -> None:
        with pytest.raises(IncompatibleError, match="run"):
            acts[verb](pipe)
        seen.append(verb)

    assert torch.equal(tiny.run(pipe, "flux", callback_on_step_end=at_step(2, act)), fresh("flux"))
    assert seen == [verb]
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


@pytest.mark.parametrize("preset", ["auto", "lossless", "cpu-demo"])
def test_every_preset_says_why(preset: str) -> None:
    """Each bundled preset resolves on FLUX: every item that is not on has a reason; later levers say so."""
    pipe = accelerate(tiny.build("flux"), preset)
    items = pipe.acceleration.plan.items
    assert items and all(entry.status in ("enabled", "skipped", "refused") for entry in items)
    assert all(entry.reason for entry in items if entry.status != "enabled")
    for entry in items:
        if entry.name.split(".")[0] in LATER:
            assert entry.status == "skipped" and "not in this version" in entry.reason
    tiny.run(pipe, "flux", num_inference_steps=10)


LATER = ("fusion",)  # places of which no value is there yet


def test_a_lever_of_a_later_version() -> None:
    """Its key says that it is not in this version, and changes nothing."""
    pipe = accelerated("flux", "cache")
    for key in LATER:
        with pytest.raises(DiffaccelError, match="not in this version"):
            accelerate(pipe, preset=None, strict=True, **{key: True})
    assert torch.equal(tiny.run(pipe, "flux"), fresh("flux"))


WANTING: list[tuple[str, dict[str, Any], type[DiffaccelError], str]] = [
    ("teacache", {}, UnsupportedModelError, "FLUX.1-dev"),
    ("teacache", {"coefficients": "flux.1-dve"}, InvalidOptionError, "FLUX.1-dev"),
    ("teacache", {"coefficients": (1.0, 0.0)}, InvalidOptionError, "threshold"),
    ("magcache", {}, UnsupportedModelError, "calibrate"),
    ("magcache", {"ratios": [1.0, 0.9]}, InvalidOptionError, "threshold"),
    ("step_schedule", {}, InvalidOptionError, "steps must name the computed steps"),
    ("step_schedule", {"steps": "slwo"}, InvalidOptionError, "0 and 1"),
    ("dbcache", {}, UnsupportedModelError, "8 front block"),
    ("dbcache", {"front_blocks": 1, "steps_policy": "statik"}, InvalidOptionError, "static"),
    ("taylorseer", {"interval": 0}, InvalidOptionError, "interval"),
    ("taylorseer", {"order": 4}, InvalidOptionError, "order"),
    ("easycache", {"branches": "both"}, InvalidOptionError, "first"),
    ("interval_cache", {"scope": "blocks"}, InvalidOptionError, "stack"),
]


@pytest.mark.parametrize(("verb", "arguments", "error", "hint"), WANTING, ids=lambda value: str(value)[:40])
def test_what_a_cache_wants(verb: str, arguments: dict[str, Any], error: type[DiffaccelError], hint: str) -> None:
    """A cache that lacks what it needs, or is told nonsense, raises what names it, and changes nothing."""
    pipe = accelerated("flux", "cache")
    with pytest.raises(error, match=hint):
        getattr(pipe, f"enable_{verb}")(**arguments)
    assert torch.equal(tiny.run(pipe, "flux"), fresh("flux"))
