"""Step caches and the machine: offload, compile, reads by the host, memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from torch._dynamo.utils import counters

from diffaccel import IncompatibleError, accelerate, attach
from diffaccel.caching.branches import BranchState
from diffaccel.caching.methods import METHODS
from tests import tiny
from tests.invariants.test_4_clock import Syncs

from .coverage import COVERED, OPTIONS
from .test_interactions import cached, strip

CALL = {"output_type": "latent", "num_inference_steps": 5}
STATIC = ("delta_dit", "interval", "magcache", "schedule", "taylorseer")
CONTENT = ("adacache", "custom", "dicache", "easycache", "first_block", "seacache", "teacache")


# ---- offload -----------------------------------------------------------------------------------------


def parameters_loaded(seen: list[ModuleGroup]) -> set[int]:
    """The parameters that were moved, by identity."""
    modules = [module for group in seen for module in group.modules]
    alone = [parameter for group in seen for parameter in group.parameters or ()]
    return {id(parameter) for module in modules for parameter in module.parameters()} | set(map(id, alone))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("schedule", "block_level"),  # nothing of the denoiser
        ("schedule", "leaf_level"),
        ("magcache", "block_level"),  # no block
        ("interval", "leaf_level"),  # no attention, no feed-forward
    ],
)
def test_what_a_hit_leaves_out_is_not_loaded(method: str, kind: str, onloads: list[ModuleGroup]) -> None:
    pipe = tiny.build("flux")
    model = pipe.transformer
    left_out = {
        "schedule": [model],
        "magcache": tiny.blocks(model),
        "interval": [part for block in tiny.blocks(model) for part in parts(block)],
    }[method]
    cpu = torch.device("cpu")
    more = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type=kind, **more)
    plain = tiny.run(pipe, "flux", **CALL)
    cached(pipe, method)
    loaded: list[set[int]] = []
    onloads.clear()

    def note(_: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        loaded.append(parameters_loaded(onloads))
        onloads.clear()
        return kwargs

    result = tiny.run(pipe, "flux", callback_on_step_end=note, **CALL)
    assert not torch.equal(result, plain)
    tracked = {id(parameter) for part in left_out for parameter in part.parameters()}
    marks = strip(pipe)["cond"]
    assert "." in marks and len(marks) == len(loaded)
    for mark, moved in zip(marks, loaded, strict=True):
        assert moved & tracked == (tracked if mark == "C" else set())


@pytest.mark.parametrize("method", ["schedule", "magcache", "interval", "first_block"])
def test_what_a_hit_leaves_out_is_not_fetched_by_accelerate(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's sequential offload: weights are on "meta" until their own module runs."""
    fetched: set[torch.nn.Module] = set()
    original = AlignDevicesHook.pre_forward

    def pre_forward(self: AlignDevicesHook, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        fetched.add(module)
        return original(self, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", pre_forward)
    pipe = tiny.build("flux")
    model, blocks = pipe.transformer, tiny.blocks(pipe.transformer)
    plain = tiny.run(cached(tiny.build("flux"), method), "flux", **CALL)
    cpu_offload(model, torch.device("cpu"))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    cached(pipe, method)
    left_out = {
        "schedule": [model],
        "magcache": blocks,
        "interval": [part for block in blocks for part in parts(block)],
        "first_block": blocks[1:],
    }[method]
    tracked = {module for part in left_out for module in part.modules() if module._parameters}
    loaded: list[set[torch.nn.Module]] = []

    def note(_: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        loaded.append(fetched & tracked)
        fetched.clear()
        return kwargs

    assert torch.equal(tiny.run(pipe, "flux", callback_on_step_end=note, **CALL), plain)
    marks = strip(pipe)["cond"]
    assert "." in marks and [bool(modules) for modules in loaded] == [mark == "C" for mark in marks]


def parts(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The attention and feed-forward modules of a FLUX block."""
    return [getattr(block, name) for name in ("attn", "ff", "ff_context", "proj_out") if hasattr(block, name)]


# ---- compile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["first_block", "dicache", "teacache", "magcache", "schedule", "easycache", "delta_dit"]
)
def test_nothing_is_compiled_twice(method: str) -> None:
    """Regional compile: blocks are whole, the decision is outside; a second call with hits makes no graph."""
    torch._dynamo.reset()
    counters.clear()
    pipe = tiny.build("flux")
    accelerate(pipe, None, compile=True, compile_backend="eager", cache=method, **COVERED, **OPTIONS[method])
    try:
        first = tiny.run(pipe, "flux", **CALL)
        made, marks = counters["stats"]["unique_graphs"], strip(pipe)
        assert made > 0 and "." in marks["cond"]
        with torch._dynamo.config.patch(error_on_recompile=True):
            second = tiny.run(pipe, "flux", **CALL)
        assert counters["stats"]["unique_graphs"] == made and sum(counters["graph_break"].values()) == 0
        assert torch.equal(first, second) and strip(pipe) == marks
        assert torch.allclose(first, tiny.run(cached(tiny.build("flux"), method), "flux", **CALL), atol=1e-5)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(("method", "more"), [("interval", {}), ("taylorseer", {"cache_use_lite_mode": False})])
def test_modules_inside_compiled_blocks_are_refused(method: str, more: dict[str, Any]) -> None:
    """Their hooks would break every graph; the refusal names both, and what was on before stays on."""
    pipe = cached(tiny.build("flux"), "schedule")
    before = tiny.run(pipe, "flux", **CALL)
    options = COVERED | OPTIONS[method] | more
    with pytest.raises(IncompatibleError, match=rf"cache\.{method}.*compile"):
        accelerate(pipe, None, compile=True, compile_backend="eager", cache=method, **options)
    assert torch.equal(tiny.run(pipe, "flux", **CALL), before)
    assert not any(vars(block).get("_compiled_call_impl") for block in tiny.blocks(pipe.transformer))
    cached(pipe, method, **more)
    tiny.run(pipe, "flux", **CALL)
    assert "." in strip(pipe)["cond"], "without compile it acts"


# ---- reads by the host -------------------------------------------------------------------------------


def syncs(pipe: Any, family: str) -> int:
    """How often the host reads a tensor's value in a run that is not the first."""
    tiny.run(pipe, family, **CALL)
    with Syncs() as mode:
        tiny.run(pipe, family, **CALL)
    return mode.count


def test_every_method_is_one_of_the_two_kinds() -> None:
    assert {*STATIC, *CONTENT, "dbcache"} == set(METHODS) - {"deepcache", "adaptive"}  # it asks at the sampler


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_reads(family: str) -> None:
    """Static caches read nothing; the others one value for each comparison."""
    pipe = tiny.build(family)
    base = syncs(attach(pipe), family)
    for method in (*STATIC, *CONTENT):
        if method == "teacache" and family == "wan":
            continue  # the time embedding: see below
        cached(pipe, method)
        more = syncs(pipe, family) - base
        report = pipe.acceleration.report
        assert report.hit_rate > 0, method
        compared = sum(step.gate is not None for step in report.steps)
        if method in STATIC:
            assert more == 0, method
        elif method == "adacache":  # compares behind a computed step, not in front of a reused one
            branches = len(report.strip())
            assert more == sum(step.computed for step in report.steps) - branches
        else:
            assert more == compared > 0, method


def test_teacache_on_the_time_embedding_reads_only_before_the_loop() -> None:
    """Wan: whatever is read is read in the loop's first step, where all steps are decided."""

    def after_the_first_step(pipe: Any) -> int:
        counts = []
        with Syncs() as mode:

            def note(_: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
                counts.append(mode.count)
                return kwargs

            tiny.run(pipe, "wan", callback_on_step_end=note, **CALL)
        return int(counts[-1] - counts[0])

    base = after_the_first_step(attach(tiny.build("wan")))
    pipe = cached(tiny.build("wan"), "teacache")
    assert after_the_first_step(pipe) == base
    assert strip(pipe) == {"cond": "C...C", "uncond": "C...C"}
    cached(pipe, "first_block")
    assert after_the_first_step(pipe) == base + 2 * 4, "negative control: a gate that looks at blocks"


# ---- memory ------------------------------------------------------------------------------------------


def storages(thing: Any) -> dict[int, int]:
    """Bytes of every storage that can be reached from a cache's own state."""
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, BranchState):
        thing = thing.memory
    if not isinstance(thing, (list, tuple)):
        thing = [getattr(thing, name) for name in getattr(thing, "__slots__", ())]
    found: dict[int, int] = {}
    for part in thing:
        found |= storages(part)
    return found


@pytest.mark.parametrize("method", sorted({*OPTIONS} - {"adaptive"}))  # its sampler's latents are weighed elsewhere
def test_bytes_reported_are_those_held(method: str) -> None:
    """At every step what the state refers to is weighed by hand; after the run nothing of it is left."""
    pipe = cached(tiny.build("flux"), method)
    held: list[int] = []
    kept: list[weakref.ref[torch.Tensor]] = []

    def note(_: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        states = pipe.acceleration.run_in_progress().state[f"cache.{method}"]
        held.append(sum(storages(states).values()))
        kept.extend(weakref.ref(sample.values[0]) for branch in states.values() for sample in branch.memory.history)
        return kwargs

    tiny.run(pipe, "flux", true_cfg=True, callback_on_step_end=note, **CALL)
    assert pipe.acceleration.report.cache_bytes_peak == pytest.approx(max(held), rel=0.05)
    gc.collect()
    assert kept and all(tensor() is None for tensor in kept)


@pytest.mark.parametrize("scope", ["denoiser", "stack", "modules"])
def test_float32_doubles_what_a_bf16_model_remembers(scope: str) -> None:
    """In every scope a reuse answers in the model's own dtype."""
    pipe = tiny.build("flux", dtype=torch.bfloat16)
    peaks, seen = [], []
    for wide in (False, True):
        cached(pipe, "schedule", cache_scope=scope, cache_float32=wide, cache_steps=[0, 1, 3])
        handle = pipe.transformer.register_forward_hook(lambda *arguments: seen.append(arguments[-1][0].dtype))
        tiny.run(pipe, "flux", **CALL)
        handle.remove()
        peaks.append(pipe.acceleration.report.cache_bytes_peak)
        assert strip(pipe) == {"cond": "CC.C."}
    assert peaks[1] == 2 * peaks[0] > 0
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("method", ["first_block", "easycache", "delta_dit", "dicache"])
def test_float32_keeps_the_models_dtype(method: str) -> None:
    pipe = tiny.build("flux", dtype=torch.bfloat16)
    cached(pipe, method, cache_float32=True)
    result = tiny.run(pipe, "flux", **CALL)
    assert result.dtype == torch.bfloat16 and torch.isfinite(result).all() and "." in strip(pipe)["cond"]


def test_the_byte_cap_is_kept() -> None:
    """Each branch holds three outputs for order 2; the cap lowers the order; below one output nothing is reused."""
    pipe, call = tiny.build("wan"), {**CALL, "num_inference_steps": 6}
    plain = tiny.run(pipe, "wan", **call)

    def peak(**options: Any) -> int:
        cached(pipe, "schedule", cache_order=2, cache_steps=[0, 1, 2, 4], **options)
        tiny.run(pipe, "wan", **call)
        return int(pipe.acceleration.report.cache_bytes_peak)

    whole = peak()
    size = whole // 6
    assert whole == 6 * size and strip(pipe) == {"cond": "CCC.C.", "uncond": "CCC.C."}
    for room in (2, 1):
        assert peak(cache_max_bytes=(room + 1) * size - 1) == 2 * room * size
        assert strip(pipe) == {"cond": "CCC.C.", "uncond": "CCC.C."}
    assert peak(cache_max_bytes=size - 1) == 0 and pipe.acceleration.report.hit_rate == 0
    assert torch.equal(tiny.run(pipe, "wan", **call), plain)


@pytest.mark.parametrize("method", sorted({*OPTIONS} - {"adaptive"}))  # which refuses a cap by name
def test_no_method_holds_more_than_the_cap(method: str) -> None:
    """Half of what each of two branches would hold: fewer steps are remembered, or none and every step is computed."""
    pipe, call = tiny.build("flux"), {**CALL, "true_cfg": True}
    plain = tiny.run(pipe, "flux", **call)
    cached(pipe, method)
    tiny.run(pipe, "flux", **call)
    cap = pipe.acceleration.report.cache_bytes_peak // 4
    cached(pipe, method, cache_max_bytes=cap)
    result, report = tiny.run(pipe, "flux", **call), pipe.acceleration.report
    assert report.cache_bytes_peak <= 2 * cap
    assert report.hit_rate > 0 or torch.equal(result, plain)
