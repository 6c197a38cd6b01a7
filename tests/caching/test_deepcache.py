"""DeepCache as a lever on SDXL: which steps, what is refused, and that nothing outlives a run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    DPMSolverMultistepScheduler,
    HeunDiscreteScheduler,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
)

from diffaccel import Plan, accelerate, plan, restore
from diffaccel.caching.gates.adacache import RatesGate
from diffaccel.caching.gates.base import ProbeGate
from diffaccel.caching.gates.easycache import RateGate
from diffaccel.caching.gates.schedule import ScheduleGate
from diffaccel.caching.guards import Guards
from diffaccel.caching.scopes.unet import Deep
from diffaccel.core.run import Run
from diffaccel.errors import InvalidOptionError, UnsupportedModelError
from tests import fingerprint, tiny
from tests.caching.unets import FREEU, OPEN, computed, deep, pipeline


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({}, 10, [0, 3, 6, 9]),
        ({"cache_interval": 4}, 10, [0, 4, 8]),
        ({"cache_interval": 4, "cache_last_steps": 1}, 10, [0, 4, 8, 9]),
        ({"cache_interval": 5, "cache_warmup_steps": 3}, 10, [0, 1, 2, 5]),
        ({"cache_interval": 1}, 4, [0, 1, 2, 3]),
    ],
)
def test_hit_pattern(options: dict[str, Any], steps: int, expected: list[int]) -> None:
    """Full at every interval-th step; host data only."""
    pipe = deep(**options)
    tiny.run(pipe, "sdxl", num_inference_steps=steps)
    assert computed(pipe) == expected
    assert pipe.acceleration.report.hit_rate == 1 - len(expected) / steps


def test_counted_from_the_first_step_that_runs() -> None:
    """Image to image begins late in the schedule, and is computed there."""
    pipe = accelerate(StableDiffusionXLImg2ImgPipeline(**pipeline().components), None, strict=True, **OPEN)
    pipe.set_progress_bar_config(disable=True)
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    call = tiny.call_kwargs("sdxl", image=image, strength=0.7, num_inference_steps=10)
    del call["height"], call["width"]
    pipe(**call)
    assert computed(pipe) == [0, 3, 6] and len(pipe.acceleration.report.steps) == 7


def test_min_steps() -> None:
    """Eight steps are computed in full, bit-equal, and the plan and the report say so; nine are not."""
    pipe = accelerate(pipeline(), None, cache="deepcache")
    item = pipe.acceleration.plan.item("cache.deepcache")
    assert item.status == "enabled" and "fewer than 9 steps" in item.reason and "one step of 3" in item.reason
    assert 0 < item.predicted["parameters_skipped"] < 1
    assert torch.equal(
        tiny.run(pipe, "sdxl", num_inference_steps=8), tiny.run(pipeline(), "sdxl", num_inference_steps=8)
    )
    assert computed(pipe) == list(range(8)) and any("min_steps" in note for note in pipe.acceleration.report.notes)
    tiny.run(pipe, "sdxl", num_inference_steps=9)
    assert computed(pipe) == [0, 3, 6, 8]


def test_off_is_bit_equal() -> None:
    pipe = deep(cache_interval=1)
    assert "interval 1" in pipe.acceleration.plan.item("cache.deepcache").reason
    assert torch.equal(tiny.run(pipe, "sdxl"), tiny.run(pipeline(), "sdxl"))


def test_verb_report_and_plan() -> None:
    """The verb with its defaults; deeper branches leave out less; a plan can be read back."""
    pipe = accelerate(pipeline("sdxl"), None)
    assert pipe.enable_deepcache(interval=3, branch=0, min_steps=0) is pipe
    plain, picture = tiny.run(pipeline("sdxl"), "sdxl"), tiny.run(pipe, "sdxl")
    assert not torch.equal(picture, plain)
    report = pipe.acceleration.report
    assert computed(pipe) == [0, 3, 5] and report.stats["cache.deepcache"]["hit_rate"] == 0.5
    assert [step.forecast_error is None for step in report.steps] == [True, True, True, False, True, False]
    again = accelerate(pipeline("sdxl"), Plan.from_dict(pipe.acceleration.plan.to_dict()))
    assert torch.equal(tiny.run(again, "sdxl"), picture)
    shares = [
        plan(pipeline("sdxl"), None, cache="deepcache", cache_branch=b).item("cache.deepcache").predicted
        for b in range(9)
    ]
    skipped = [share["parameters_skipped"] for share in shares]
    assert skipped == sorted(skipped, reverse=True) and skipped[0] > 0.9
    pipe.disable_cache()
    assert torch.equal(tiny.run(pipe, "sdxl"), plain)


def test_undo() -> None:
    """No trace in variables, registries and state dicts; the same bits; FreeU and fused projections still work."""
    pipe = pipeline("sdxl")
    plain = tiny.run(pipe, "sdxl")
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, None, strict=True, **OPEN, cache_branch=4)
    assert not torch.equal(tiny.run(pipe, "sdxl"), plain)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, "sdxl"), plain)
    other = pipeline("sdxl")
    for one in (pipe, other):
        one.enable_freeu(**FREEU)
        one.unet.fuse_qkv_projections()
    assert torch.equal(tiny.run(pipe, "sdxl"), tiny.run(other, "sdxl"))


CHANGES: dict[str, dict[str, Any]] = {
    "batch": {"prompt": list(tiny.PROMPTS[:2])},
    "guidance": {"guidance_scale": 1.0},
    "prompt": {"prompt": tiny.PROMPTS[1], "seed": 5},
    "same": {},
    "size": {"height": 24, "width": 16},
    "steps": {"num_inference_steps": 11},
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_the_next_run_is_a_fresh_one(change: str) -> None:
    pipe = deep(cache_branch=1)
    tiny.run(pipe, "sdxl")
    second = tiny.run(pipe, "sdxl", **CHANGES[change])
    assert torch.equal(second, tiny.run(deep(cache_branch=1), "sdxl", **CHANGES[change]))
    assert computed(pipe) != [step.index for step in pipe.acceleration.report.steps]


@pytest.mark.parametrize("where", ["computed", "reused", "between"])
def test_an_exception_in_the_middle(where: str) -> None:
    """Inside a computed call, inside a reused one, between two: nothing is left of the run."""
    pipe, fresh = deep(cache_branch=1), deep(cache_branch=1)
    expected = tiny.run(fresh, "sdxl")

    def stop(*_: Any) -> None:
        raise RuntimeError("stop")

    def at(pipe: Any, index: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 3 and where == "between":
            stop()
        if index == {"computed": 2, "reused": 3}.get(where):
            handles.append(pipe.unet.conv_norm_out.register_forward_hook(stop))
        return kwargs

    handles: list[Any] = []
    with pytest.raises(RuntimeError, match="stop"):
        tiny.run(pipe, "sdxl", callback_on_step_end=at)
    for handle in handles:
        handle.remove()
    assert torch.equal(tiny.run(pipe, "sdxl"), expected)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "sdxl"), tiny.run(pipeline(), "sdxl"))


def test_second_order_schedulers_and_multistep_ones() -> None:
    """Heun goes back and forth: the cache stands down and says so. Multistep solvers make one call a step."""
    pipe, plain = pipeline(), pipeline()
    for one in (pipe, plain):
        one.scheduler = HeunDiscreteScheduler()
    accelerate(pipe, None, strict=True, **OPEN)
    assert torch.equal(tiny.run(pipe, "sdxl"), tiny.run(plain, "sdxl"))
    assert all(step.computed for step in pipe.acceleration.report.steps)
    assert any("order 2" in note for note in pipe.acceleration.report.notes)
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(tiny.build("sdxl").scheduler.config)
    tiny.run(pipe, "sdxl")
    assert computed(pipe) == [0, 3]


def test_memory() -> None:
    """One feature while it runs, on top of nothing; no byte after it."""
    sizes: list[int] = []
    pipe = deep("sdxl")

    def at(pipe: Any, index: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        states = [run.state["cache.deepcache"] for run in _runs()]
        sizes.append(sum(s.bytes for state in states for s in state.values()))
        return kwargs

    tiny.run(pipe, "sdxl", callback_on_step_end=at)
    report = pipe.acceleration.report
    feature = 2 * 8 * 8 * 8 * 4  # both guidance halves, 8 channels, 8 x 8 latents, float32
    assert set(sizes) == {feature} and report.cache_bytes_peak == feature and report.cache_bytes_held == 0
    gc.collect()
    assert not _runs()


def _runs() -> list[Run]:
    return [thing for thing in gc.get_objects() if type(thing) is Run and "cache.deepcache" in thing.state]


def test_controlnet_makes_it_stand_down() -> None:
    """Its residuals are added to skip connections that a reused step lacks: left out of the plan, with the reason."""
    net = ControlNetModel.from_unet(pipeline().unet, conditioning_embedding_out_channels=(8, 8))
    tiny.redraw_zeros(net, torch.Generator().manual_seed(9))

    def build() -> Any:
        pipe = StableDiffusionXLControlNetPipeline(**pipeline().components, controlnet=net)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    pipe = accelerate(build(), None, **OPEN)
    [item] = pipe.acceleration.plan.items
    assert item.status == "skipped" and "controlnet" in item.reason
    assert torch.equal(tiny.run(pipe, "sdxl", image=image), tiny.run(build(), "sdxl", image=image))
    assert all(step.computed for step in pipe.acceleration.report.steps)


@pytest.mark.parametrize("gate", [RateGate(0.3), RatesGate()], ids=lambda gate: type(gate).__name__)
def test_gates_that_decide_before_the_denoiser(gate: Any) -> None:
    """Content gates that look at what goes in, or at the remembered feature, decide about the deep part as well."""
    pipe = accelerate(pipeline("sdxl"), None)
    pipe.enable_cache(gate=gate, guard=Guards(max_consecutive=2), scope=Deep(1))
    tiny.run(pipe, "sdxl", num_inference_steps=12)
    assert 0 < len(computed(pipe)) < 12


def _other_blocks() -> Any:
    pipe = pipeline()
    pipe.unet.mid_block.__class__ = type("OddBlock", (type(pipe.unet.mid_block),), {})
    return pipe


def _no_card() -> Any:
    pipe = pipeline()
    pipe.unet.register_to_config(addition_embed_type="text")
    return pipe


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "flux": (lambda: tiny.build("flux"), {}, r"flux: .*no U-Net"),
    "wan": (lambda: tiny.build("wan"), {}, r"wan: .*no U-Net"),
    "unknown": (_no_card, {}, r"unknown: .*no card for UNet2DConditionModel"),
    "branch": (pipeline, {"cache_branch": 4}, r"branch=4.*0 to 3"),
    "blocks": (_other_blocks, {}, r"sdxl: .*OddBlock"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_where_it_cannot_act(case: str) -> None:
    """The plan says why, and the verb raises."""
    build, options, reason = REFUSED[case]
    pipe = build()
    item = plan(pipe, None, cache="deepcache", **options).item("cache.deepcache")
    assert item.status == "skipped"
    with pytest.raises(UnsupportedModelError, match=reason):
        accelerate(pipe, None, strict=True, cache="deepcache", **options)


def test_gates_that_look_at_blocks_cannot_decide() -> None:
    pipe = accelerate(pipeline(), None)
    with pytest.raises(UnsupportedModelError, match=r"looks at blocks.*U-Net"):
        pipe.enable_cache(gate=ProbeGate(0.1), scope=Deep())
    with pytest.raises(UnsupportedModelError, match="no U-Net"):
        accelerate(tiny.build("flux"), None).enable_cache(gate=ScheduleGate("10"), scope=Deep())


@pytest.mark.parametrize("wrong", [{"interval": 0}, {"branch": -1}, {"branch": 1.5}, {"order": 9}])
def test_bad_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        accelerate(pipeline(), None, cache="deepcache", **{f"cache_{key}": value for key, value in wrong.items()})


def test_the_deepest_branch_without_a_middle() -> None:
    pipe = pipeline("sdxl")
    pipe.unet.mid_block = None
    with pytest.raises(UnsupportedModelError, match="nothing would be left"):
        accelerate(pipe, None, strict=True, cache="deepcache", cache_branch=8)


def test_easycache_on_a_unet() -> None:
    """A cache that knows nothing of blocks works on U-Nets as well."""
    pipe = accelerate(pipeline(), None, strict=True, cache="easycache", cache_threshold=0.3, cache_min_steps=0)
    picture = tiny.run(pipe, "sdxl", num_inference_steps=12)
    assert computed(pipe)[:5] == [0, 1, 2, 3, 4] and len(computed(pipe)) < 12
    assert torch.equal(tiny.run(pipe, "sdxl", num_inference_steps=12), picture)
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "sdxl"), tiny.run(pipeline(), "sdxl"))
