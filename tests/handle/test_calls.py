"""What users pass to a call: several pictures per prompt, lists of generators, latents, callbacks, modes, bars.

A call without any of these, an interrupted one, and changes between calls are in tests/invariants.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from diffaccel import attach, restore
from tests import tiny
from tests.invariants.levers import Stop, accelerated, fresh, fresh_run, plain, put_on, trace

FAMILIES = ("flux", "wan")
NUMBER = {"flux": "num_images_per_prompt", "wan": "num_videos_per_prompt"}
BRANCHES = {"flux": 1, "wan": 2}


def generators(*seeds: int) -> list[torch.Generator]:
    """One generator per picture."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def many(family: str, *seeds: int) -> dict[str, Any]:
    """A call with two prompts, two pictures of each, and a generator for each picture."""
    return {"prompt": [*tiny.PROMPTS[:2]], NUMBER[family]: 2, "generator": generators(*(seeds or (3, 4, 5, 6)))}


# ---- batches and generators ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_list_of_generators(family: str) -> None:
    """Attached: the bits of plain. Cached: the run of a fresh pipeline, every call after another too."""
    expected = tiny.run(tiny.build(family), family, **many(family))
    assert len(expected) == 4 and not torch.equal(expected[0], expected[1])
    pipe = attach(tiny.build(family))
    assert torch.equal(tiny.run(pipe, family, **many(family)), expected)
    assert not torch.equal(tiny.run(pipe, family, **many(family, 4, 3, 5, 6)), expected)
    put_on(pipe, family, "cache", cache_threshold=0.0)
    assert torch.equal(tiny.run(pipe, family, **many(family)), expected)

    new = accelerated(family)
    cached = tiny.run(new, family, **many(family))
    assert not torch.equal(cached, expected)
    put_on(pipe, family, "cache")
    tiny.run(pipe, family)
    assert torch.equal(tiny.run(pipe, family, **many(family)), cached)
    assert trace(pipe) == trace(new)
    assert torch.equal(tiny.run(pipe, family), fresh(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_generators_are_drawn_from_as_by_plain(family: str) -> None:
    """After a call each generator stands where a plain call leaves it."""
    theirs, ours = generators(3, 4, 5, 6), generators(3, 4, 5, 6)
    tiny.run(tiny.build(family), family, **many(family) | {"generator": theirs})
    pipe = accelerated(family)
    tiny.run(pipe, family, **many(family) | {"generator": ours})
    assert 0 < pipe.acceleration.report.hit_rate < 1
    for one, other, untouched in zip(theirs, ours, generators(3, 4, 5, 6), strict=True):
        assert torch.equal(one.get_state(), other.get_state())
        assert not torch.equal(one.get_state(), untouched.get_state())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_paused_call_with_a_list_of_generators(family: str) -> None:
    """Given up at step 2 and resumed after another run: the pictures of the undisturbed call."""
    expected = tiny.run(accelerated(family), family, **many(family))
    pipe = accelerated(family)
    states = []

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            states.append(pipe.acceleration.snapshot())
            raise Stop
        return kwargs

    with pytest.raises(Stop):
        tiny.run(pipe, family, callback_on_step_end=callback, **many(family))
    tiny.run(pipe, family, **many(family, 7, 8, 9, 10))
    assert torch.equal(tiny.output(pipe.acceleration.resume(states[0])), expected)


# ---- latents -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_as_output_and_as_input(family: str) -> None:
    """output_type="latent" gives plain's latents when nothing acts; a call from given latents is cached alike."""
    expected = plain(family, output_type="latent")
    assert expected.shape != plain(family).shape
    pipe = attach(tiny.build(family))
    assert torch.equal(tiny.run(pipe, family, output_type="latent"), expected)
    assert pipe.acceleration.report.stages["decode"] >= 0 and pipe.acceleration.report.completed

    put_on(pipe, family, "cache")
    latents = tiny.run(pipe, family, output_type="latent")
    assert not torch.equal(latents, expected)
    records = trace(pipe)
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    assert trace(pipe) == records == fresh_run(family)[1], "decoding or not changes nothing before it"

    shape = expected.shape
    start = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    given = tiny.run(pipe, family, latents=start.clone())
    assert torch.equal(given, tiny.run(accelerated(family), family, latents=start.clone()))
    assert not torch.equal(given, fresh(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_when_the_vae_is_tiled(family: str) -> None:
    """A lever on the decoder does not touch a call that does not decode."""
    pipe = attach(tiny.build(family)).enable_vae_tiling()
    assert torch.equal(tiny.run(pipe, family, output_type="latent"), plain(family, output_type="latent"))
    assert pipe.acceleration.report.completed


@pytest.mark.parametrize("family", FAMILIES)
def test_encoding_and_decoding_by_hand(family: str) -> None:
    """`encode_prompt` before and `vae.decode` after a call, as users who save memory do: the call's own picture."""
    pipe = accelerated(family, "both")
    expected, latents = fresh(family, "both"), tiny.run(pipe, family, output_type="latent")
    tokens = {"max_sequence_length": tiny.TEXT_TOKENS}
    with torch.no_grad():
        if family == "flux":
            embeds, pooled, _ = pipe.encode_prompt(tiny.PROMPTS[0], None, **tokens)
            given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
            unpacked = pipe._unpack_latents(latents, 8, 8, pipe.vae_scale_factor)
            pixels = pipe.vae.decode(unpacked / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor)[0]
            picture = pipe.image_processor.postprocess(pixels, output_type="pt")
        else:
            embeds, negative = pipe.encode_prompt(tiny.PROMPTS[0], "grey", **tokens)
            given = {"prompt_embeds": embeds, "negative_prompt_embeds": negative, "negative_prompt": None}
            mean, std = (torch.tensor(pipe.vae.config[name]) for name in ("latents_mean", "latents_std"))
            pixels = pipe.vae.decode(latents * std.view(1, -1, 1, 1, 1) + mean.view(1, -1, 1, 1, 1))[0]
            picture = pipe.video_processor.postprocess_video(pixels, output_type="pt")
    torch.testing.assert_close(picture, expected, atol=1e-6, rtol=0)
    assert torch.equal(tiny.run(pipe, family, prompt=None, **given), expected)
    assert trace(pipe) == fresh_run(family, "both")[1]


# ---- callbacks -----------------------------------------------------------------------------------------


def damp(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A callback that changes the latents."""
    return {"latents": kwargs["latents"] * (0.5 if index == 2 else 1.0)}


class Damp(PipelineCallback):
    """The same as an object of diffusers' own kind."""

    tensor_inputs = ["latents"]  # noqa: RUF012, as diffusers' own

    def callback_fn(self, pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return damp(pipe, index, timestep, kwargs)


class Look(PipelineCallback):
    """Notes what it is given and changes nothing."""

    tensor_inputs = ["prompt_embeds"]  # noqa: RUF012

    def __init__(self, seen: list[tuple[type, int, list[str]]]) -> None:
        super().__init__()
        self.seen = seen

    def callback_fn(self, pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        self.seen.append((type(pipe), index, sorted(kwargs)))
        return kwargs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_callback_that_changes_the_latents(family: str) -> None:
    """As a function and as a PipelineCallback: plain's bits when attached, one and the same run when cached."""
    expected = tiny.run(tiny.build(family), family, callback_on_step_end=damp)
    assert not torch.equal(expected, plain(family))
    pipe = attach(tiny.build(family))
    for callback in (damp, Damp()):
        assert torch.equal(tiny.run(pipe, family, callback_on_step_end=callback), expected)
    put_on(pipe, family, "cache", cache_threshold=0.0)
    assert torch.equal(tiny.run(pipe, family, callback_on_step_end=Damp()), expected)
    put_on(pipe, family, "cache")
    found = [tiny.run(pipe, family, callback_on_step_end=callback) for callback in (damp, Damp())]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], fresh(family))
    assert torch.equal(tiny.run(pipe, family), fresh(family))


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_several_callback_objects(family: str) -> None:
    """MultiPipelineCallbacks: each is called once a step, with the tensors that it gets from plain diffusers."""
    seen: list[tuple[type, int, list[str]]] = []
    both = MultiPipelineCallbacks([Look(seen), Damp()])
    expected = tiny.run(tiny.build(family), family, callback_on_step_end=both)
    plainly, seen[:] = list(seen), []
    pipe = attach(tiny.build(family))
    assert torch.equal(tiny.run(pipe, family, callback_on_step_end=both), expected)
    assert [(index, names) for _, index, names in seen] == [(index, names) for _, index, names in plainly]
    assert [index for _, index, _ in seen] == list(range(tiny.STEPS))
    assert all(issubclass(given, kind) for (given, _, _), (kind, _, _) in zip(seen, plainly, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_callback_may_ask_for_tensors(family: str) -> None:
    """callback_on_step_end_tensor_inputs are handed over, and an unknown one is diffusers' own error."""
    seen = set()

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.update(kwargs)
        return kwargs

    pipe = accelerated(family)
    wanted = ["latents", "prompt_embeds"]
    call = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": wanted}
    assert torch.equal(tiny.run(pipe, family, **call), fresh(family))
    assert seen == set(wanted)
    for tested in (tiny.build(family), pipe):
        with pytest.raises(ValueError, match="callback_on_step_end_tensor_inputs"):
            tiny.run(tested, family, **call | {"callback_on_step_end_tensor_inputs": ["nonsense"]})
    assert torch.equal(tiny.run(pipe, family), fresh(family)), "a refused call leaves nothing behind"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_of_an_interrupted_call(family: str) -> None:
    """An interrupt ends the run early: it is not called complete, and the pattern up to there is the whole run's."""

    def callback(given: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        given._interrupt = index == 2
        return kwargs

    pipe = accelerated(family)
    tiny.run(pipe, family, callback_on_step_end=callback)
    report = pipe.acceleration.report
    assert not report.completed and len(report.steps) == 3 * BRANCHES[family]
    assert trace(pipe) == fresh_run(family)[1][: len(report.steps)]
    assert report.cache_bytes_held == 0


# ---- inference mode ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lever", ["cache", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_inference_mode_around_accelerate_and_around_calls(family: str, lever: str) -> None:
    """In any order of inside and outside, accelerate, calls and restore do the same."""
    expected, records = fresh_run(family, lever)
    for around_accelerate in (True, False):
        pipe = tiny.build(family)
        with torch.inference_mode(around_accelerate):
            put_on(pipe, family, lever)
        for around_call in (False, True, False):
            with torch.inference_mode(around_call):
                assert torch.equal(tiny.run(pipe, family), expected)
                assert trace(pipe) == records
        restore(pipe)
        assert torch.equal(tiny.run(pipe, family), plain(family))
        assert not any(parameter.is_inference() for parameter in pipe.transformer.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_verbs_inside_inference_mode(family: str) -> None:
    """A lever switched on, reconfigured and off inside leaves a pipeline that works and trains outside."""
    pipe = attach(tiny.build(family))
    with torch.inference_mode():
        pipe.enable_first_block_cache(threshold=1e9, min_steps=0)
        tiny.run(pipe, family)
        assert pipe.acceleration.report.hit_rate > 0
        pipe.enable_first_block_cache(threshold=0.0, min_steps=0)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    with torch.inference_mode():
        pipe.disable_cache()
    assert torch.equal(tiny.run(pipe, family), plain(family))
    block = tiny.blocks(pipe.transformer)[0]
    parameter = next(block.parameters())
    parameter.square().sum().backward()
    assert parameter.grad is not None and parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family: str) -> None:
    """Under torch.autocast: attached and at threshold 0 plain's bits, and no trace of it in the next call."""
    with torch.autocast("cpu", torch.bfloat16):
        expected = tiny.run(tiny.build(family), family)
        assert not torch.equal(expected, plain(family))
        assert torch.equal(tiny.run(attach(tiny.build(family)), family), expected)
        assert torch.equal(tiny.run(accelerated(family, cache_threshold=0.0), family), expected)
        pipe = accelerated(family)
        assert torch.isfinite(tiny.run(pipe, family)).all()
    assert 0 < pipe.acceleration.report.hit_rate < 1
    assert torch.equal(tiny.run(pipe, family), fresh(family))


# ---- progress bar --------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["set before", "set after"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_disabled_bar_is_silent(family: str, before: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """disable=True before or after accelerate: nothing on stdout or stderr."""
    pipe = tiny.build(family)
    pipe.set_progress_bar_config(disable=before)
    put_on(pipe, family, "cache")
    pipe.set_progress_bar_config(disable=True)
    capfd.readouterr()
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    written = capfd.readouterr()
    assert written.out == "" and written.err == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_enabled_bar_counts_the_cached_calls(family: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The bar of diffusers goes to the end; its last postfix is what the report says; plain has none."""

    def last_line(tested: Any) -> str:
        capfd.readouterr()
        tiny.run(tested, family)
        return capfd.readouterr().err.replace("\n", "\r").rstrip("\r").split("\r")[-1]

    pipe = tiny.build(family)
    pipe.set_progress_bar_config(disable=False, desc="drawing", mininterval=0)
    plainly = last_line(pipe)
    assert "drawing" in plainly and f"{tiny.STEPS}/{tiny.STEPS}" in plainly and "cached" not in plainly
    attach(pipe)
    assert "cached" not in last_line(pipe), "nothing is cached, so nothing is said"
    put_on(pipe, family, "cache")
    for _ in range(2):
        line = last_line(pipe)
        steps = pipe.acceleration.report.steps
        hits = sum(not step.computed for step in steps)
        assert hits > 0 and f"{tiny.STEPS}/{tiny.STEPS}" in line and "drawing" in line
        assert re.search(r"cached (\d+)/(\d+)", line).groups() == (str(hits), str(len(steps)))  # type: ignore[union-attr]
    restore(pipe)
    assert "cached" not in last_line(pipe)
