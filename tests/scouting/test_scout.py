"""Seed scouting: pictures bit-equal to whole runs, steps counted, memory bounded, pipelines as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from diffaccel.cli import main
from diffaccel.errors import IncompatibleError, InvalidOptionError
from diffaccel.models.registry import lookup
from diffaccel.scouting import preview, scout
from tests import tiny
from tests.fingerprint import differences, snapshot_pipe
from tests.models.families import table

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "first_block": {"cache": "first_block", "cache_threshold": 0.3, "cache_min_steps": 0},
    "taylorseer": {"cache": "taylorseer", "cache_min_steps": 0},
}


def call_of(family: str, **more: Any) -> dict[str, Any]:
    call = tiny.call_kwargs(family, **more)
    return {key: value for key, value in call.items() if key not in ("generator", "prompt")}


def whole(pipe: Any, call: dict[str, Any], prompt: str, seed: int) -> torch.Tensor:
    return tiny.output(pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), **call))


@pytest.mark.parametrize(("family", "plan"), [("flux", "first_block"), ("wan", "taylorseer"), ("sdxl", "plain")])
def test_finished_pictures_have_the_bits_of_whole_runs(family: str, plan: str) -> None:
    call = call_of(family, num_inference_steps=8)
    truth = accelerate(tiny.build(family), None, **PLANS[plan])
    pipe = accelerate(tiny.build(family), None, **PLANS[plan])
    found = scout(pipe, ["red ring", "blue square"], [5, 9], 3, **call)
    assert [(c.prompt, c.seed) for c in found.candidates] == [
        ("red ring", 5), ("red ring", 9), ("blue square", 5), ("blue square", 9)
    ]  # fmt: skip
    outputs = found.finish(3, 0, 3)
    for index, output in zip((3, 0, 3), outputs, strict=True):
        one = found.candidates[index]
        assert tiny.output(output).equal(whole(truth, call, one.prompt, one.seed))
    assert outputs[0] is outputs[2]  # run to its end once
    assert not tiny.output(outputs[0]).equal(tiny.output(outputs[1]))


def test_a_scouted_seed_costs_its_steps_and_a_finished_one_the_rest() -> None:
    """4 seeds to step 3 of 8, one finished: 4 x 3 + 5 computed calls, of 32."""
    pipe = tiny.build("flux")
    seen: list[int] = []
    pipe.transformer.register_forward_pre_hook(lambda *_: seen.append(1))
    with scout(pipe, "red ring", 4, 3, **call_of("flux", num_inference_steps=8)) as found:
        assert len(seen) == found.computed == 12
        found.finish(2)
        assert len(seen) == found.computed + 3 == 20  # replayed calls are answered from the snapshot, in the root hook
        assert [c.finished for c in found.candidates] == [0, 0, 5, 0]


def test_a_pipeline_that_was_not_accelerated_is_as_before() -> None:
    pipe = tiny.build("flux")
    plain = tiny.run(pipe, "flux")
    before = snapshot_pipe(pipe)
    with scout(pipe, "red ring", 2, 2, **call_of("flux")) as found:
        found.finish(0)
    assert differences(before, snapshot_pipe(pipe)) == []
    assert tiny.run(pipe, "flux").equal(plain)
    with pytest.raises(InvalidOptionError, match="strange"):
        scout(pipe, "red ring", 2, 2, strange=1)
    assert differences(before, snapshot_pipe(pipe)) == []


def test_memory_is_bounded_and_what_finds_no_room_is_run_anew() -> None:
    call = call_of("flux", num_inference_steps=8)
    truth = accelerate(tiny.build("flux"), None, **PLANS["first_block"])
    pipe = accelerate(tiny.build("flux"), None, **PLANS["first_block"])
    with scout(tiny.build("flux"), "red ring", 1, 4, **call) as found:
        plain = found.bytes_held
    with scout(pipe, "red ring", 4, 4, **call) as found:
        each = found.bytes_held / 4
        assert all(c.kept for c in found.candidates)
        assert each > plain + pipe.acceleration.report.cache_bytes_peak / 2  # what the cache remembers counts
    assert found.bytes_held == 0
    limit = 2.5 * each
    with scout(pipe, "red ring", 4, 4, memory_gib=limit / 1024**3, **call) as found:
        assert [c.kept for c in found.candidates] == [True, True, False, False]
        assert 0 < found.bytes_held <= limit
        for index in (1, 3):
            output = tiny.output(found.finish(index)[0])
            assert output.equal(whole(truth, call, "red ring", index))
        assert found.candidates[3].finished > found.candidates[1].finished


def test_a_preview_is_small_and_near_the_picture() -> None:
    """On the trained testbed, half way: nearer to its own picture than to another seed's."""
    from diffaccel import testbed

    pipe = testbed.load("image")
    pipe.set_progress_bar_config(disable=True)
    call = testbed.call_kwargs("image") | {"output_type": "pt"}
    prompt = testbed.prompts("test", 1)[0]
    with scout(pipe, prompt, 2, 6, num_inference_steps=12, **call) as found:
        shown = [candidate.preview for candidate in found.candidates]
        ends = [output.images[0] for output in found.finish(0, 1)]
    near = [[float((a - b).square().mean()) for b in ends] for a in shown]
    assert near[0][0] < near[0][1] and near[1][1] < near[1][0]


def test_pooling_and_drawing_on() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert preview.pooled(x, 2).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert preview.pooled(x[:, :, None].expand(1, 1, 3, 4, 4), 2).shape == (1, 1, 3, 2, 2)
    assert preview.pooled(x, 1) is x and preview.pooled(x, 5) is x
    from diffusers import FlowMatchEulerDiscreteScheduler, PNDMScheduler

    truth, noise = torch.randn(2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    sigmas = [1.0, 0.8, 0.5]
    path = [(1 - s) * truth + s * noise for s in sigmas]
    flow = FlowMatchEulerDiscreteScheduler()
    assert (preview.drawn_on(path[0], path[1], sigmas, 1, flow) - truth).abs().max() < 1e-5
    assert preview.drawn_on(None, path[1], sigmas, 1, flow) is path[1]
    assert preview.drawn_on(path[0], path[1], sigmas, 1, PNDMScheduler()) is path[1]


def test_the_decode_of_a_preview_is_smaller_and_the_vae_as_before() -> None:
    pipe, seen = tiny.build("sdxl"), list[int]()
    pipe.vae.decoder.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    before = set(vars(pipe.vae))
    with preview.decoding_small(pipe.vae, 2, side=8):
        small = pipe.vae.decode(torch.randn(1, 4, 16, 16)).sample
    assert seen == [4] and small.shape[-1] == 8 and set(vars(pipe.vae)) == before


def test_what_cannot_be_scouted_is_refused_before_anything_is_run() -> None:
    pipe = tiny.build("flux")
    pipe.transformer.register_forward_pre_hook(lambda *_: pytest.fail("something was run"))
    call = call_of("flux", num_inference_steps=6)
    for changed, words in (
        ({"until_step": 6}, "until_step must be 1 to 5, got 6"),
        ({"until_step": 0}, "until_step"),
        ({"until_step": True}, "until_step"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [-1]}, "seeds"),
        ({"prompts": []}, "prompts"),
        ({"memory_gib": "much"}, "memory_gib"),
        ({"callback_on_step_end": print}, "callback_on_step_end"),
    ):
        given: dict[str, Any] = {"prompts": "red ring", "seeds": 2, "until_step": 2, **call, **changed}
        with pytest.raises(InvalidOptionError, match=words) as refused:
            scout(pipe, **given)
        assert len(str(refused.value)) <= 300 and not hasattr(pipe, "acceleration")
    pixart = table.build("pixart_alpha")
    with pytest.raises(IncompatibleError, match="no callback_on_step_end"):
        scout(pixart, "red ring", 2, 2)
    assert lookup(pipe).family == "flux"


def test_an_error_in_mid_scouting_leaves_nothing() -> None:
    pipe = tiny.build("flux")
    before, count = snapshot_pipe(pipe), [0]

    def fail(*_: Any) -> None:
        count[0] += 1
        if count[0] > 4:
            raise RuntimeError("cancelled")

    remove = pipe.transformer.register_forward_pre_hook(fail).remove
    with pytest.raises(RuntimeError, match="cancelled"):
        scout(pipe, "red ring", 3, 2, **call_of("flux"))
    remove()
    assert not hasattr(pipe, "acceleration")
    restore(pipe)
    assert tiny.run(pipe, "flux").equal(tiny.run(tiny.build("flux"), "flux"))
    assert not [line for line in differences(before, snapshot_pipe(pipe)) if "new" in line and "transformer" in line]


def test_the_command_writes_one_page_and_the_chosen_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = ["scout", "testbed:image", "--prompt", "a red ring", "--seeds", "3", "--until", "2", "--steps", "4"]
    words += ["--preset", "none", "--html", str(page), "--finish", "1", "--out", str(tmp_path), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["computed"] == 3 * 2 + 2 and [row["seed"] for row in found["candidates"]] == [0, 1, 2]
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 3 and "seed 1, finished" in text and "<script" not in text
    assert Path(found["files"][0]).is_file()
    assert main([*words[:-1], "--finish", "3"]) == 1


def test_sixteen_seeds_cost_a_third_of_sixteen_runs() -> None:
    """The figure of benchmarks/scouting.py, at its size: 16 x 6 + 2 x 22 of 16 x 28 calls."""
    from benchmarks import scouting

    found = scouting.measure({}, all_whole=False)
    assert (found["computed_scouting"], found["computed_finishing"]) == (96, 44)
    assert found["computed_whole_runs"] == 448 and found["share"] <= scouting.AIM and found["bit_equal"]
