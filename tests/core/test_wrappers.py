"""Denoisers that others wrapped: levers act on the model inside by its own names, outside of the wrapper where they
act on whole calls, and undo leaves a way out; `restore` once raised for good."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diffaccel import accelerate, attach, plan, restore
from diffaccel.core.compat import REGISTRY, foreign_offload
from diffaccel.core.wrappers import class_of, in_a_graph, own_modules, replicated, unwrap_module, wrappers
from diffaccel.errors import IncompatibleError
from tests import tiny
from tests.loaded.wrapped import WRAPPERS, Forwarding, sharded_in_place, sharded_whole
from tests.quantization.loras import state_dict

CACHE: dict[str, Any] = {"cache": "first_block", "cache_threshold": 1e9, "cache_min_steps": 0}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", [name for name in WRAPPERS if "compile" not in name])  # (those are rows)
def test_a_block_cache_acts_and_goes_through_every_wrapper(name: str) -> None:
    pipe = WRAPPERS[name](tiny.build("flux"))
    plain = tiny.run(pipe, "flux")
    had = {key: dict(vars(part)) for key, part in pipe.transformer.named_modules()}
    for _ in range(2):
        accelerate(pipe, None, strict=True, **CACHE)
        assert pipe.acceleration.plan.family == "flux"
        assert not tiny.run(pipe, "flux").equal(plain) and pipe.acceleration.report.hit_rate > 0.5
        restore(pipe)
        assert restore(pipe) is pipe and not hasattr(pipe, "acceleration")
        assert tiny.run(pipe, "flux").equal(plain)
    for key, part in pipe.transformer.named_modules():
        assert ("forward" in vars(part)) == ("forward" in had[key])
        assert not getattr(vars(part).get(REGISTRY), "hooks", {}), key


def test_the_model_inside_and_its_names() -> None:
    model = tiny.build("flux").transformer
    assert unwrap_module(model) is model and list(wrappers(model)) == [] and replicated(model) == ""
    outer = torch.compile(Forwarding(model), backend="eager")
    assert unwrap_module(outer) is model and [type(one).__name__ for one in wrappers(outer)] == [
        "OptimizedModule",
        "Forwarding",
    ]
    assert in_a_graph(outer) and class_of(outer) is type(model)
    names = dict(model.named_modules())
    blocks = model.transformer_blocks
    blocks[0] = torch.compile(blocks[0], backend="eager")
    assert any("_orig_mod" in name for name, _ in model.named_modules())
    assert own_modules(model) == names


def test_lora_goes_by_the_models_names_in_blocks_that_a_user_compiled() -> None:
    pipe, twin = tiny.build("flux"), attach(tiny.build("flux"))
    state = state_dict(twin, "flux")
    blocks = pipe.transformer.transformer_blocks
    blocks[0] = torch.compile(blocks[0], backend="eager")
    plain = tiny.run(pipe, "flux")
    for each in (attach(pipe), twin):
        each.acceleration.loras.load(state, "a")
    assert tiny.run(pipe, "flux").equal(tiny.run(twin, "flux"))
    assert tiny.run(restore(pipe), "flux").equal(plain)


@pytest.mark.parametrize("shard", [sharded_in_place, sharded_whole])
def test_shards_are_refused_by_name(shard: Any) -> None:
    pipe = shard(tiny.build("flux"))
    plain = tiny.run(pipe, "flux")
    for options in ({"offload": "stage"}, {"offload": "layerwise"}, {"quantization": "fp8"}, {"compile": True}):
        if "offload" in options:
            options = {**options, "offload_store": "disk"}
        [item] = plan(pipe, None, **options).items
        assert item.status == "refused" and "FSDP" in item.reason
    if shard is sharded_whole:
        with pytest.raises(IncompatibleError, match="FSDP"):
            attach(pipe).acceleration.loras.load(state_dict(tiny.build("flux"), "flux"), "a")
    assert tiny.run(restore(pipe), "flux").equal(plain)


def test_a_model_of_peft_says_how_to_get_rid_of_it() -> None:
    pipe = attach(WRAPPERS["`get_peft_model`"](tiny.build("flux")))
    with pytest.raises(IncompatibleError, match=r"peft .*merge_and_unload\(\)"):
        pipe.acceleration.loras.load(state_dict(tiny.build("flux"), "flux"), "a")
    pipe.transformer = pipe.transformer.merge_and_unload()
    pipe.acceleration.loras.load(state_dict(tiny.build("flux"), "flux"), "a")


@pytest.mark.parametrize(
    ("places", "moved"),
    [
        ({"": "cpu"}, False),
        ({"": torch.device("cuda:0")}, False),
        ({"": "disk"}, True),
        ({"a": 0, "b": 1}, True),
        ({"a": 0, "b": "cpu"}, True),
        (None, False),
    ],
)
def test_a_device_map_moves_where_it_names_two_places(places: Any, moved: bool) -> None:
    """`from_single_file` leaves a map of one device behind, and nothing moves."""
    model = torch.nn.Linear(2, 2)
    model.hf_device_map = places
    assert foreign_offload(model) == ("a device_map" if moved else None)


def test_copies_on_several_devices_take_levers_of_whole_calls_alone() -> None:
    """They are made anew in each call, from modules whose hooks run the original's weights."""
    pipe = WRAPPERS["`DataParallel`"](tiny.build("flux"))
    assert plan(pipe, None, cache="first_block").items[0].status == "enabled"
    pipe.transformer.device_ids = [0, 1]
    acts = {"cache": ("schedule", {"cache_steps": [0, 2]}), "guidance": ("reuse", {})}
    for key, (value, more) in acts.items():
        [item] = plan(pipe, None, **{key: value}, **more).items
        assert item.status == "enabled", item.reason
    for options in (
        {"cache": "first_block"},
        {"cache": "schedule", "cache_steps": [0, 2], "cache_scope": "modules"},
        {"attention": "native"},
        {"quantization": "fp8"},
        {"quantization": "svdquant"},
        {"compile": True},
        {"offload": "layerwise", "offload_store": "disk"},
    ):
        [item] = plan(pipe, None, **options).items
        assert item.status != "enabled" and "DataParallel runs copies of it on 2 devices" in item.reason, item.name


@pytest.mark.parametrize("shard", [sharded_in_place, sharded_whole])
def test_members_that_hold_shards_decide_alike(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one of them would gather a block that another leaves out, and wait for it for good."""
    from diffaccel.caching.methods.first_block import FirstBlockCache
    from diffaccel.planner.resolve import resolve

    for pipe, several in ((shard(tiny.build("flux")), True), (tiny.build("flux"), False)):
        target = resolve(pipe, None, None, None, False, {}).target
        assert FirstBlockCache().full_recipe(target).process_group is None  # one process
        with monkeypatch.context() as patched:
            patched.setattr(dist, "get_world_size", lambda group=None: 2)
            assert (FirstBlockCache().full_recipe(target).process_group is not None) == several


def test_quantization_goes_by_the_models_names_in_blocks_that_a_user_compiled() -> None:
    pipe, twin = tiny.build("flux"), tiny.build("flux")
    for blocks in (pipe.transformer.transformer_blocks, pipe.transformer.single_transformer_blocks):
        for index, block in enumerate(blocks):
            blocks[index] = torch.compile(block, backend="eager")
    reasons = [plan(each, None, quantization=q).items[0] for each in (pipe, twin) for q in ("fp8", "svdquant")]
    assert [item.status for item in reasons] == ["enabled"] * 4
    assert [item.reason for item in reasons[:2]] == [item.reason for item in reasons[2:]]


def test_what_a_replaced_denoiser_costs_is_warned_of() -> None:
    """The run goes on without the lever, which may need more memory than there is; once only the plan said so."""
    pipe = accelerate(tiny.build("flux"), None, **CACHE, compile=True, compile_backend="eager")
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.warns(UserWarning, match=r"compile is off now, as a denoiser was replaced: transformer is compiled"):
        pipe.acceleration.sync()
    assert pipe.acceleration.plan.enabled == ("cache.first_block",)
