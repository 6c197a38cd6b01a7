"""What users do to an accelerated pipeline between calls: move, cast, replace parts, derive pipelines, copy, pickle.

A dtype change, a replaced scheduler or transformer, Flux's from_pipe and copies that may be refused are in
tests/invariants; here is what they leave open.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig, WanVideoToVideoPipeline

from diffaccel import Plan, accelerate, attach, plan, restore
from diffaccel.errors import IncompatibleError
from tests import tiny
from tests.invariants.levers import (
    CACHE_ITEM,
    REUSE_ALL,
    accelerated,
    cache_options,
    counted,
    fresh,
    fresh_run,
    item,
    pattern,
    plain,
    put_on,
    trace,
)

FAMILIES = ("flux", "wan")


def deeper(family: str) -> torch.nn.Module:
    """A transformer of the same class with one block more."""
    model = tiny.build(family, seed=1).transformer
    config = dict(model.config) | {"num_layers": model.config["num_layers"] + 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made: torch.nn.Module = type(model).from_config(config)
    tiny.redraw_zeros(made, torch.Generator().manual_seed(4))
    return made.eval()


def with_transformer(family: str, model: torch.nn.Module) -> Any:
    """A plain pipeline around a transformer."""
    pipe = tiny.build(family)
    pipe.transformer = model
    return pipe


# ---- moves and casts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lever", ["cache", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_restore_after_a_cast(family: str, lever: str) -> None:
    """Accelerate, run, cast, run, restore: the bits of a plain pipeline cast the same way, and its dtypes."""
    pipe = accelerated(family, lever)
    tiny.run(pipe, family)
    assert pipe.to("cpu", torch.bfloat16) is pipe
    tiny.run(pipe, family)
    assert 0 < pipe.acceleration.report.hit_rate <= 1
    restore(pipe)
    other = tiny.build(family).to("cpu", torch.bfloat16)
    assert torch.equal(tiny.run(pipe, family), tiny.run(other, family))
    for (name, ours), (_, theirs) in zip(tiny.component_modules(pipe), tiny.component_modules(other), strict=True):
        expected = {key: value.dtype for key, value in theirs.state_dict().items()}
        assert {key: value.dtype for key, value in ours.state_dict().items()} == expected, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_move_before_the_first_call(family: str) -> None:
    """Accelerated in one dtype and first called in another: as accelerated after the cast."""
    pipe = accelerated(family).to(torch.bfloat16)
    new = put_on(tiny.build(family, dtype=torch.bfloat16), family, "cache")
    assert torch.equal(tiny.run(pipe, family), tiny.run(new, family))
    assert trace(pipe) == trace(new)
    assert item(pipe.acceleration.plan, CACHE_ITEM).status == "enabled"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cast_of_the_vae_alone(family: str) -> None:
    """Users keep the decoder in float32: casting one component does not touch what acts on another."""
    pipe = accelerated(family)
    pipe.vae.to(torch.float64)
    latents = tiny.run(pipe, family, output_type="latent")
    assert torch.equal(latents, tiny.run(accelerated(family), family, output_type="latent"))
    assert trace(pipe) == fresh_run(family)[1]


# ---- a replaced transformer ----------------------------------------------------------------------------


@pytest.mark.parametrize("lever", ["cache", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_of_another_depth(family: str, lever: str) -> None:
    """The levers follow onto a model with more blocks."""
    exact = tiny.run(with_transformer(family, deeper(family)), family)
    new = put_on(with_transformer(family, deeper(family)), family, lever, cache_threshold=REUSE_ALL)
    expected = tiny.run(new, family)
    assert not torch.equal(expected, exact)

    pipe = accelerated(family, lever, cache_threshold=REUSE_ALL)
    tiny.run(pipe, family)
    pipe.transformer = deeper(family)
    last = tiny.blocks(pipe.transformer)[-1]
    with counted(last.attn1 if family == "wan" else last.attn) as calls:
        assert torch.equal(tiny.run(pipe, family), expected)
    assert trace(pipe) == trace(new)
    assert calls[0] == pattern(pipe).count(True) > 0, "the block that came with the new model is skipped too"
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_speaks_of_the_transformer_that_came_later(family: str) -> None:
    """What the plan predicts (blocks skipped) is computed from the model that runs."""
    pipe = accelerated(family)
    pipe.transformer = deeper(family)
    tiny.run(pipe, family)
    new = put_on(with_transformer(family, deeper(family)), family, "cache")
    ours, theirs = (item(tested.acceleration.plan, CACHE_ITEM) for tested in (pipe, new))
    assert ours.predicted["blocks_skipped"] == theirs.predicted["blocks_skipped"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_with_a_cache_of_diffusers_comes_later(family: str) -> None:
    """As where accelerate meets one: ours steps back with the reason in the plan, the native one goes on."""
    twin = with_transformer(family, tiny.build(family, seed=1).transformer)
    twin.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    native = tiny.run(twin, family)
    pipe = accelerated(family)
    tiny.run(pipe, family)
    pipe.transformer = tiny.build(family, seed=1).transformer
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    result = tiny.run(pipe, family)
    entry = item(pipe.acceleration.plan, CACHE_ITEM)
    assert entry.status == "refused" and "FirstBlockCacheConfig" in entry.reason
    assert torch.equal(result, native)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_replaced_in_the_middle_of_a_call(family: str) -> None:
    """By a callback, as for a refiner: that call goes on with the new model as it is, the next one is accelerated."""

    def swap(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            given.transformer = tiny.build(family, seed=1).transformer
        return kwargs

    expected = tiny.run(tiny.build(family), family, callback_on_step_end=swap)
    assert not torch.equal(expected, plain(family))
    for pipe in (attach(tiny.build(family)), accelerated(family, cache_threshold=0.0)):
        assert torch.equal(tiny.run(pipe, family, callback_on_step_end=swap), expected)
    pipe = accelerated(family)
    tiny.run(pipe, family, callback_on_step_end=swap)
    assert {step.index for step in pipe.acceleration.report.steps} == {0, 1, 2}
    new = put_on(with_transformer(family, tiny.build(family, seed=1).transformer), family, "cache")
    assert torch.equal(tiny.run(pipe, family), tiny.run(new, family))
    assert trace(pipe) == trace(new)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_of_another_dtype_through_register_modules(family: str) -> None:
    """`register_modules`, as loaders do it, with a model in bfloat16 in a pipeline whose rest follows."""
    new = put_on(tiny.build(family, seed=1, dtype=torch.bfloat16), family, "cache")
    expected = tiny.run(new, family)
    pipe = accelerated(family)
    tiny.run(pipe, family)
    other = tiny.build(family, seed=1, dtype=torch.bfloat16)
    pipe.register_modules(**{name: module for name, module in tiny.component_modules(other)})
    assert torch.equal(tiny.run(pipe, family), expected)
    assert trace(pipe) == trace(new)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_that_another_pipeline_has_accelerated(family: str) -> None:
    """Refused at the call, naming the component; the other pipeline goes on, and both come back."""
    first, second = accelerated(family), accelerated(family)
    own = first.transformer
    first.transformer = second.transformer
    with pytest.raises(IncompatibleError, match="transformer"):
        tiny.run(first, family)
    assert torch.equal(tiny.run(second, family), fresh(family))
    first.transformer = own
    assert torch.equal(tiny.run(first, family), fresh(family))
    first.transformer = second.transformer
    restore(second)
    assert torch.equal(tiny.run(first, family), fresh(family)), "free now"
    restore(first)
    assert torch.equal(tiny.run(second, family), plain(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_transformer_for_a_while(family: str) -> None:
    """Taken out to free memory: the call fails as a plain one does, and works when it is back."""

    def failure(pipe: Any) -> str:
        with pytest.raises(AttributeError) as caught:
            tiny.run(pipe, family)
        return str(caught.value)

    bare = tiny.build(family)
    bare.transformer = None
    pipe = accelerated(family)
    own, pipe.transformer = pipe.transformer, None
    assert failure(pipe) == failure(bare)
    assert str(pipe.acceleration)
    pipe.transformer = own
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    pipe.transformer = None
    restore(pipe)
    pipe.transformer = own
    assert torch.equal(tiny.run(pipe, family), plain(family))


# ---- pipelines made from others ------------------------------------------------------------------------


def test_from_pipe_of_wan() -> None:
    """Video to video made from an accelerated pipeline is plain and exact, and the source is as before."""
    pipe = accelerated("wan")
    tiny.run(pipe, "wan")
    scheduler = tiny.build("wan_v2v").scheduler
    made = WanVideoToVideoPipeline.from_pipe(pipe, scheduler=scheduler)
    made.set_progress_bar_config(disable=True)
    assert type(made) is WanVideoToVideoPipeline and made.transformer is pipe.transformer
    assert torch.equal(tiny.run(made, "wan_v2v"), plain("wan_v2v"))
    assert torch.equal(tiny.run(pipe, "wan"), fresh("wan"))
    with pytest.raises(IncompatibleError, match="transformer"):
        put_on(made, "wan_v2v", "cache")
    restore(pipe)
    put_on(made, "wan_v2v", "cache")
    assert torch.equal(tiny.run(made, "wan_v2v"), fresh("wan_v2v"))
    restore(made)
    assert torch.equal(tiny.run(made, "wan_v2v"), plain("wan_v2v"))
    assert torch.equal(tiny.run(pipe, "wan"), plain("wan"))


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pipe_on_the_class_of_an_accelerated_pipeline(family: str) -> None:
    """`type(pipe).from_pipe(other)`: an ordinary pipeline, accelerated only when asked to be."""
    pipe, other = accelerated(family), tiny.build(family)
    made = type(pipe).from_pipe(other)
    made.set_progress_bar_config(disable=True)
    assert isinstance(made, type(other)) and type(made).__name__ == type(other).__name__
    assert not hasattr(made, "acceleration")
    assert torch.equal(tiny.run(made, family), plain(family))
    with pytest.raises(AttributeError, match="acceleration"):
        made.enable_first_block_cache()
    put_on(made, family, "cache")
    assert torch.equal(tiny.run(made, family), fresh(family))
    assert type(restore(made)) is type(other)
    assert torch.equal(tiny.run(made, family), plain(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_components_of_an_accelerated_pipeline(family: str) -> None:
    """A pipeline built from `pipe.components` is plain and exact, before and after restore."""
    pipe = accelerated(family, "both")
    plain_class = next(cls for cls in type(pipe).__mro__ if cls is type(tiny.build(family)))
    made: DiffusionPipeline = plain_class(**pipe.components)
    made.set_progress_bar_config(disable=True)
    for _ in range(2):
        assert torch.equal(tiny.run(made, family), plain(family))
        assert torch.equal(tiny.run(pipe, family), fresh(family, "both"))
    restore(pipe)
    assert torch.equal(tiny.run(made, family), plain(family))


# ---- plans, reports and copies -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_pickles_and_copies(family: str) -> None:
    """Before a run and with its measurements; the copy does what the original does."""
    decided = plan(tiny.build(family), preset=None, **cache_options(family))
    pipe = accelerate(tiny.build(family), decided)
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    measured = pipe.acceleration.plan
    assert item(measured, CACHE_ITEM).measured and measured != decided
    for original in (decided, measured):
        for again in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
            assert isinstance(again, Plan) and again == original
            assert str(again) == str(original) and again.to_toml() == original.to_toml()
            other = accelerate(tiny.build(family), again)
            assert torch.equal(tiny.run(other, family), fresh(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_report_pickles(family: str) -> None:
    pipe = accelerated(family)
    tiny.run(pipe, family)
    report = pipe.acceleration.report
    again = pickle.loads(pickle.dumps(report))
    assert again == report and again.strip() == report.strip() and 0 < again.hit_rate < 1


@pytest.mark.parametrize("lever", ["attach", "cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_copy_is_a_pipeline_of_its_own(family: str, lever: str) -> None:
    """Same levers, same picture, own weights; the original is as it was, and each is undone alone."""
    pipe = accelerated(family, lever)
    before = tiny.run(pipe, family)
    [clone] = copy.deepcopy({"one": [pipe]})["one"]
    assert (
        clone.acceleration is not pipe.acceleration
        and clone.acceleration.plan.enabled == pipe.acceleration.plan.enabled
    )
    assert torch.equal(tiny.run(clone, family), before) and torch.equal(tiny.run(pipe, family), before)
    with torch.no_grad():
        for parameter in tiny.denoiser(clone).parameters():
            parameter.mul_(0.5)
    assert not torch.equal(tiny.run(clone, family), before), "the copy computes with its own weights"
    assert torch.equal(tiny.run(pipe, family), before)
    restore(pipe)
    assert "_diffusers_hook" in vars(tiny.denoiser(clone)), "restoring one leaves the other"
    assert torch.equal(tiny.run(pipe, family), plain(family))


@pytest.mark.parametrize("options", [
    {"quantization": "int8"},
    {"quantization": "svdquant"},
    {"offload": "layerwise", "offload_store": "disk"},
    {"offload": "stage", "offload_store": "disk"},
    {"attention": "flex", "vae_tiling": "exact"},
], ids=str)  # fmt: skip
def test_a_deep_copy_of_every_kind_of_lever(options: dict[str, Any]) -> None:
    pipe = accelerate(tiny.build("flux"), None, **options)
    before = tiny.run(pipe, "flux")
    clone = copy.deepcopy(pipe)
    assert torch.equal(tiny.run(clone, "flux"), before) and torch.equal(tiny.run(pipe, "flux"), before)
    assert torch.equal(tiny.run(restore(clone), "flux"), plain("flux"))
    assert torch.equal(tiny.run(pipe, "flux"), before)


def test_a_deep_copy_that_fails_leaves_the_pipeline_accelerated() -> None:
    pipe = accelerated("flux", "cache")
    before, plan = tiny.run(pipe, "flux"), pipe.acceleration.plan.enabled

    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("not this one")

    pipe.stubborn = Stubborn()
    with pytest.raises(RuntimeError, match="not this one"):
        copy.deepcopy(pipe)
    assert pipe.acceleration.plan.enabled == plan and torch.equal(tiny.run(pipe, "flux"), before)
    with pytest.raises(IncompatibleError, match=r"deepcopy.*shallow"):
        copy.deepcopy(copy.copy(pipe))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shallow_copy_shares_its_acceleration(family: str) -> None:
    """copy.copy shares weights and handle and runs the same; only restoring the original undoes the acceleration."""
    pipe = accelerated(family)
    clone = copy.copy(pipe)
    assert torch.equal(tiny.run(clone, family), fresh(family))
    restore(clone)
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    clone = copy.copy(pipe)
    restore(pipe)
    for tested in (clone, pipe):
        assert torch.equal(tiny.run(tested, family), plain(family))
    put_on(pipe, family, "cache")
    assert torch.equal(tiny.run(pipe, family), fresh(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_attached_and_restored_pipeline_pickles(family: str) -> None:
    """A plain pipeline pickles; so does one that was accelerated, run and restored."""
    pipe = accelerated(family)
    tiny.run(pipe, family)
    again = pickle.loads(pickle.dumps(restore(pipe)))
    torch.testing.assert_close(tiny.run(again, family), plain(family), atol=1e-6, rtol=0)
    attach(again)
    torch.testing.assert_close(tiny.run(again, family), plain(family), atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_pickling_an_accelerated_pipeline_is_refused_by_name(family: str) -> None:
    """Like deepcopy: named, with the way out (a plain pipeline does pickle)."""
    pipe = accelerated(family)
    with pytest.raises(IncompatibleError, match=r"pickle.*restore"):
        pickle.dumps(pipe)
