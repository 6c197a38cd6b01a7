"""22 faults that we reproduced in cache-dit 1.5.3, turned on ourselves: one test each.

Each test says in one line what happened there."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from diffaccel import accelerate, attach, plan, restore
from diffaccel.caching.gates.base import ProbeGate
from diffaccel.caching.gates.schedule import ScheduleGate
from diffaccel.errors import DiffaccelError, IncompatibleError, InvalidOptionError, UnsupportedModelError
from diffaccel.extrapolation.forecast import Forecast, Sample
from diffaccel.extrapolation.schedule import fora, taylorseer, uniform
from tests import tiny
from tests.caching.settings import (
    FORECASTS,
    NO_GUARDS,
    assert_fresh,
    cached,
    first_latents,
    latents,
    options,
    plain_latents,
    strip,
)
from tests.invariants.levers import REUSE_ALL, Stop, raise_at, second_size

SOME = ("first_block", "dbcache", "taylorseer lite", "taylorseer modules", "schedule")
some = pytest.mark.parametrize("method", SOME)
STATIC = ("interval", "schedule", "taylorseer lite", "taylorseer modules", "delta_dit")


def everything(cls: type) -> dict[str, int]:
    """The attributes of a class and its bases, by identity."""
    return {f"{base.__qualname__}.{name}": id(value) for base in cls.__mro__ for name, value in vars(base).items()}


@some
def test_disabling_one_of_two_keeps_the_other(method: str) -> None:
    """Fault 1: of two pipelines of one class the first was disabled; the second raised AttributeError."""
    first, second = cached("flux", method), cached("flux", method)
    latents(first, "flux")
    first.disable_cache()
    assert_fresh(second, "flux", method)
    restore(first)
    assert_fresh(second, "flux", method)
    assert torch.equal(latents(first, "flux"), plain_latents("flux"))


@some
def test_nothing_is_written_on_classes(method: str) -> None:
    """Fault 2: enabling wrote on the class, so that another pipeline of it took itself for cached."""
    other = tiny.build("flux")
    classes = {type(other), *map(type, other.transformer.modules())}
    before = {cls: everything(cls) for cls in classes}
    pipe = cached("flux", method)
    latents(pipe, "flux")
    assert {cls: everything(cls) for cls in classes} == before
    assert type(other) is not type(pipe) and not hasattr(other, "acceleration")
    assert torch.equal(latents(other, "flux"), plain_latents("flux"))
    assert_fresh(pipe, "flux", method)


def test_a_second_configuration_counts() -> None:
    """Fault 3: enabling a second time with another configuration was silently ignored."""
    pipe = cached("flux", "dbcache", cache_threshold=0.0)
    assert torch.equal(latents(pipe, "flux"), plain_latents("flux"))
    for method in (*SOME, "dbcache"):
        accelerate(pipe, preset=None, **options("flux", method))
        assert_fresh(pipe, "flux", method)
    pipe.enable_dbcache(threshold=REUSE_ALL, front_blocks=1, warmup_steps=3, min_steps=0, last_steps=0)
    latents(pipe, "flux")
    assert strip(pipe) == {"cond": "CCC..."}
    pipe.enable_step_schedule(steps="110101", min_steps=0)
    latents(pipe, "flux")
    assert strip(pipe) == {"cond": "CC.C.C"}
    assert "took the place of cache.dbcache" in pipe.acceleration.plan.notes[0]


@pytest.mark.parametrize("method", [*STATIC, "dbcache", "first_block order 1"])
def test_guidance_off_halves_nothing(method: str) -> None:
    """Fault 4: at guidance 1 the branch was still told by the parity of calls, and no step was reused."""
    guided, pipe = cached("wan", method), cached("wan", method)
    latents(guided, "wan")
    latents(pipe, "wan", guidance_scale=1.0)
    assert set(strip(guided)) == {"cond", "uncond"} and set(strip(pipe)) == {"cond"}
    assert "." in strip(pipe)["cond"] and "C" in strip(pipe)["cond"][1:]
    if method in STATIC:
        assert strip(pipe)["cond"] == strip(guided)["cond"] == strip(guided)["uncond"]
    assert_fresh(guided, "wan", method)


def by_hand(pipe: Any, steps: int = 6, size: int = 4, seed: int = 0, stop: int | None = None) -> torch.Tensor:
    """A denoising loop of one's own over Wan's transformer, without its pipeline."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 16, 2, size, size, generator=generator)
    text = torch.randn(1, 16, 32, generator=generator)
    pipe.scheduler.set_timesteps(steps)
    with torch.no_grad():
        for index, t in enumerate(pipe.scheduler.timesteps):
            if index == stop:
                raise Stop("cancelled")
            v = pipe.transformer(x, timestep=t.expand(1), encoder_hidden_states=text, return_dict=False)[0]
            x = pipe.scheduler.step(v, t, x, return_dict=False)[0]
    return x


def in_run(pipe: Any, **loop: Any) -> torch.Tensor:
    """The same loop inside a run, in which steps are seen."""
    with pipe.acceleration.run():
        return by_hand(pipe, **loop)


@some
def test_the_transformer_alone_runs_twice(method: str) -> None:
    """Fault 5: without the pipeline the second request went on in the first one's state; another size crashed."""
    pipe = cached("wan", method)
    first = in_run(pipe)
    found = strip(pipe)
    assert "." in found["cond"] and torch.equal(in_run(pipe), first) and strip(pipe) == found
    larger = in_run(pipe, size=6)
    assert torch.equal(larger, in_run(cached("wan", method), size=6))
    assert torch.equal(in_run(pipe), first)
    # Not even a run around it: no step can be seen, so nothing is reused and no state is left.
    plain = by_hand(tiny.build("wan"))
    assert torch.equal(by_hand(pipe), plain) and torch.equal(by_hand(pipe), plain)
    assert torch.equal(in_run(pipe), first)


@some
def test_the_transformer_alone_interrupted(method: str) -> None:
    """Fault 6: after a run of the transformer that was interrupted at step 3 the counter stayed off by three."""
    pipe = cached("wan", method)
    reference = in_run(cached("wan", method))
    with pytest.raises(Stop):
        in_run(pipe, stop=3, seed=5)
    assert pipe.acceleration.report.cache_bytes_held == 0
    assert torch.equal(in_run(pipe), reference)


MASK = "11010101"


@pytest.mark.parametrize("policy", ["static", "dynamic", "schedule"])
def test_a_mask_for_another_number_of_steps(policy: str) -> None:
    """Fault 7: a mask for 8 steps in a run of 16 reused all of the steps beyond it, without a word."""
    if policy == "schedule":
        pipe = cached("flux", "schedule", cache_steps=MASK)
    else:
        mask = {"cache_steps_mask": MASK, "cache_steps_policy": policy, "cache_threshold": 0.5}
        pipe = cached("flux", "dbcache", **mask)
    latents(pipe, "flux", num_inference_steps=8)
    found = strip(pipe)["cond"]
    assert all(mine == "C" for mine, flag in zip(found, MASK, strict=True) if flag == "1") and "." in found
    for steps in (16, 5):
        with pytest.raises(InvalidOptionError, match=rf"8 entries.*{steps} steps"):
            latents(pipe, "flux", num_inference_steps=steps)
    latents(pipe, "flux", num_inference_steps=8)
    assert strip(pipe)["cond"] == found


@pytest.mark.parametrize("mask", ["01010101", [False, True] * 4, [1, 3, 5]], ids=str)
@pytest.mark.parametrize("method", ["schedule", "dbcache"])
def test_a_mask_that_begins_with_a_reuse(method: str, mask: Any) -> None:
    """Fault 8: a static mask that begins with 0 failed an assertion in the middle of the run."""
    pipe = tiny.build("flux")
    key = {"cache_steps": mask} if method == "schedule" else {"cache_steps_mask": mask, "cache_steps_policy": "static"}
    with pytest.raises(InvalidOptionError, match="step 0"):
        accelerate(pipe, preset=None, **options("flux", method, **key))
    assert not hasattr(pipe, "acceleration")
    assert torch.equal(latents(pipe, "flux"), plain_latents("flux"))


@pytest.mark.parametrize("total", [1, 2, 3, 5, 7])
def test_masks_for_odd_numbers_of_steps(total: int) -> None:
    """Fault 9: the mask maker failed an assertion for 1, 2, 3, 5 and 7 steps."""
    for make in (uniform, fora, taylorseer):
        mask = make(total, 2)
        assert len(mask) == total and mask[0]
    for method in ("interval", "taylorseer lite", "delta_dit"):
        pipe = cached("flux", method)
        assert torch.isfinite(latents(pipe, "flux", num_inference_steps=total)).all()
        assert len(strip(pipe)["cond"]) == total
    pipe = cached("flux", "schedule", cache_steps="fast")
    with pytest.raises(InvalidOptionError, match=rf"no published steps mask for {total} steps"):
        latents(pipe, "flux", num_inference_steps=total)


def test_more_front_and_back_blocks_than_there_are() -> None:
    """Fault 10: two front and two back blocks of three were accepted, ran twice, and spoilt the picture."""
    for front, back in ((2, 2), (2, 1), (1, 2), (3, 0)):
        wish = options("wan", "dbcache", cache_front_blocks=front, cache_back_blocks=back)
        with pytest.raises(UnsupportedModelError, match=r"3 block\(s\).*nothing would be left"):
            accelerate(tiny.build("wan"), preset=None, strict=True, **wish)
    pipe = cached("wan", "dbcache", cache_threshold=0.0)
    assert torch.equal(latents(pipe, "wan"), plain_latents("wan"))


@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_the_default_on_a_small_model(family: str) -> None:
    """Fault 11: eight front blocks, the default, on fewer blocks were accepted and failed in the first forward."""
    pipe = tiny.build(family)
    accelerate(pipe, preset=None, cache="dbcache")
    item = pipe.acceleration.plan.item("cache.dbcache")
    assert item.status == "skipped" and "8 front block(s)" in item.reason
    assert torch.equal(latents(pipe, family), plain_latents(family))
    with pytest.raises(UnsupportedModelError, match="8 front block"):
        pipe.enable_dbcache()
    pipe.enable_dbcache(front_blocks=1)
    assert pipe.acceleration.plan.item("cache.dbcache").status == "enabled"


def test_misspelt_options_are_refused(tmp_path: Path) -> None:
    """Fault 12: a misspelt option, as keyword or in a file, was silently ignored."""
    pipe = attach(tiny.build("flux"))
    for verb, wrong, right in (
        ("dbcache", {"treshold": 0.1}, "threshold"),
        ("dbcache", {"fornt_blocks": 1}, "front_blocks"),
        ("taylorseer", {"intervall": 2}, "interval"),
        ("teacache", {"coeficients": (1.0, 0.0)}, "coefficients"),
        ("magcache", {"ratio": [1.0]}, "ratios"),
        ("step_schedule", {"step": [0, 1]}, "steps"),
        ("easycache", {"enable_sperate_cfg": True}, "cache.easycache.*branches"),
    ):
        with pytest.raises(InvalidOptionError, match=right):
            getattr(pipe, f"enable_{verb}")(**wrong)
    path = tmp_path / "mine.toml"
    path.write_text('[wishes]\ncache = "dbcache"\ncache_treshold = 0.1\n')
    with pytest.raises(InvalidOptionError, match="cache_threshold"):
        accelerate(pipe, str(path))
    assert pipe.acceleration.plan.enabled == ()


def test_one_configuration_for_two_models() -> None:
    """Fault 13: the configuration was changed by the first model, and the second one got the change."""
    gate, schedule = ProbeGate(0.3, tested=True), ScheduleGate([0, 2, 4])
    parts = copy.deepcopy((gate, schedule))
    for one in (gate, schedule):
        results = []
        for family in ("wan", "flux", "wan", "flux"):
            pipe = attach(tiny.build(family)).enable_cache(gate=one, min_steps=0, last_steps=0)
            results.append((latents(pipe, family), strip(pipe)))
        for (bits, found), (again, same) in zip(results[:2], results[2:], strict=True):
            assert torch.equal(bits, again) and found == same
        assert len(results[0][1]) == 2 and len(results[1][1]) == 1
    assert (gate, schedule) == parts
    made = plan(tiny.build("flux"), preset=None, **options("flux", "dbcache"))
    text = made.to_toml()
    for _ in range(2):
        assert_fresh(accelerate(tiny.build("flux"), made), "flux", "dbcache")
    assert made.to_toml() == text


@some
def test_a_deep_copy_runs_its_own_weights(method: str) -> None:
    """Fault 14: a deep copy of the transformer went on running the original's weights."""
    pipe = cached("flux", method)
    latents(pipe, "flux")
    with pytest.raises(IncompatibleError, match="restore"):
        copy.deepcopy(pipe.transformer)
    assert_fresh(pipe, "flux", method)
    restore(pipe)
    twin = tiny.build("flux")
    twin.transformer = copy.deepcopy(pipe.transformer)
    assert torch.equal(latents(twin, "flux"), plain_latents("flux"))
    with torch.no_grad():
        twin.transformer.proj_out.weight.mul_(2)
    assert not torch.equal(latents(twin, "flux"), plain_latents("flux"))
    assert torch.equal(latents(pipe, "flux"), plain_latents("flux"))


@some
def test_pickle_is_refused_and_saving_works(method: str, tmp_path: Path) -> None:
    """Fault 15: an enabled transformer did not pickle; here it is refused with what to do, and saving works."""
    pipe = cached("flux", method)
    latents(pipe, "flux")
    with pytest.raises(IncompatibleError, match="restore"):
        pickle.dumps(pipe)
    keys = list(tiny.build("flux").transformer.state_dict())
    assert list(pipe.transformer.state_dict()) == keys, "the order of keys is that of a model never touched"
    pipe.transformer.save_pretrained(tmp_path)
    loaded = type(pipe.transformer).from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == keys
    assert_fresh(pipe, "flux", method)
    restore(pipe)
    again = pickle.loads(pickle.dumps(pipe.transformer))
    assert list(again.state_dict()) == keys


# Fault 16 (8 graphs, 6 breaks, recompiles in the second call) is in tests/compilation/test_caches_on_compiled.py.


@some
def test_size_and_steps_change(method: str) -> None:
    """Fault 17: another size or number of steps, sound there in pipeline mode; it must be here as well."""
    pipe = cached("wan", method)
    for call in ({}, second_size("wan"), {"num_inference_steps": 9}, {"num_inference_steps": 4}, {}):
        assert_fresh(pipe, "wan", method, **call)


@some
def test_two_caches_at_once_are_refused(method: str) -> None:
    """Fault 18: diffusers' own cache below ours was accepted; here each is refused by the other's name."""
    pipe = tiny.build("flux")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    native = latents(pipe, "flux")
    with pytest.raises(IncompatibleError, match="FirstBlockCacheConfig"):
        accelerate(pipe, preset=None, strict=True, **options("flux", method))
    assert torch.equal(latents(pipe, "flux"), native)
    pipe.transformer.disable_cache()
    accelerate(pipe, preset=None, strict=True, **options("flux", method))
    assert_fresh(pipe, "flux", method)


@some
def test_hooks_that_were_there_before(method: str) -> None:
    """Fault 19: on a model with hooks the checks were skipped with a warning."""
    pipe = tiny.build("flux")
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    assert torch.equal(latents(pipe, "flux"), plain_latents("flux"))
    with pytest.raises(DiffaccelError, match="front block"):
        accelerate(pipe, preset=None, strict=True, cache="dbcache", **NO_GUARDS)
    accelerate(pipe, preset=None, **options("flux", method))
    assert_fresh(pipe, "flux", method)
    restore(pipe)
    assert torch.equal(latents(pipe, "flux"), plain_latents("flux"))


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("at", [[0, 2, 4, 6], [0, 1, 4, 9], [0, 5, 6, 8]], ids=str)
def test_polynomials_are_foretold(order: int, at: list[int]) -> None:
    """Fault 20: forecasts of order 2 and 3 missed t^2 and t^3, more so at irregular steps."""
    past = [Sample(float(t), (torch.full((1, 2, 2), float(t), dtype=torch.float64) ** order,)) for t in at]
    for target in (at[-1] + 1, at[-1] + 3):
        [found] = Forecast(order).predict(past[-order - 1 :], float(target))
        torch.testing.assert_close(found, torch.full_like(found, float(target) ** order), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["first_block", "dbcache", "dicache", "teacache"])
def test_the_worst_sample_of_a_batch_may_decide(method: str) -> None:
    """Fault 21: one decision for the whole batch, with no other rule; here the worst sample may decide."""

    def gates(prompt: Any, seed: int, **changes: Any) -> float:
        pipe = cached("flux", method, cache_threshold=0.9, **changes)
        many = len(prompt) if isinstance(prompt, list) else 1
        noise = torch.stack([torch.randn(16, 16, generator=torch.Generator().manual_seed(3 + i)) for i in range(2)])
        noise = noise[seed : seed + many] * torch.tensor([1.0, 6.0])[seed : seed + many, None, None]
        latents(pipe, "flux", prompt=prompt, latents=noise)
        value = pipe.acceleration.report.steps[1].gate
        assert value is not None
        return float(value)

    first, second = gates(tiny.PROMPTS[0], 0), gates(tiny.PROMPTS[1], 1)
    assert abs(first - second) > 0.01 * max(first, second)
    pair = [*tiny.PROMPTS[:2]]
    assert gates(pair, 0, cache_per_sample=True) == pytest.approx(max(first, second), rel=1e-4)
    assert min(first, second) < gates(pair, 0) < max(first, second)


@pytest.mark.parametrize("method", [*FORECASTS, "dbcache", "delta_dit", "interval"])
def test_sd3_with_a_forecast(method: str) -> None:
    """Fault 22: on SD3, whose last block returns no text stream, the default forecaster failed at the first hit."""
    pipe = cached("sd3", method)
    for _ in range(2):
        assert_fresh(pipe, "sd3", method)
    result, found = first_latents("sd3", method)
    assert "." in found["cond_uncond"] and torch.isfinite(result).all()
    assert not torch.equal(result, plain_latents("sd3"))


@some
def test_no_state_outlives_the_run(method: str) -> None:
    """Buffers of 2 to 6 hidden states were kept until the next call; here none outlives the run."""
    pipe = cached("wan", method)
    with pytest.raises(Stop):
        latents(pipe, "wan", callback_on_step_end=raise_at(4, Stop("cancelled")))
    assert pipe.acceleration.report.cache_bytes_held == 0 < pipe.acceleration.report.cache_bytes_peak
    for module in pipe.transformer.modules():
        for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values():
            assert not [key for key, value in vars(hook).items() if isinstance(value, torch.Tensor)]


@some
def test_diffusers_own_cache_works_afterwards(method: str) -> None:
    """There, after enable and disable diffusers' first-block cache raised TypeError on FLUX."""
    twin, pipe = tiny.build("flux"), cached("flux", method)
    latents(pipe, "flux")
    restore(pipe)
    for one in (twin, pipe):
        one.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    assert torch.equal(latents(pipe, "flux"), latents(twin, "flux"))
