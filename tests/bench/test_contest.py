"""`bench` on a real pipeline with a clock of its own: who ran, what figures say, what is left behind."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffaccel import accelerate
from diffaccel.bench import bench, svg
from diffaccel.bench.arena import Arena
from diffaccel.bench.result import Result, read
from diffaccel.errors import InvalidOptionError
from diffaccel.quality import psnr
from tests import fingerprint, tiny

CACHE = {"cache": "interval", "cache_interval": 2, "cache_min_steps": 0}
CALL = {"height": 16, "width": 16, "guidance_scale": 3.5, "max_sequence_length": 16, "num_inference_steps": 6}
PROMPTS = ["red ring", "blue square"]


def ticking(step: float = 0.5) -> Callable[[], float]:
    """A clock on which nothing takes time but the looking: every measured span is `step`."""
    return itertools.count(0.0, step).__next__


@pytest.fixture(scope="module")
def measured() -> tuple[Any, Result]:
    pipe = tiny.build("flux")
    plans = {"cached": CACHE, "fewer": {"steps": 3}}
    found = bench(pipe, plans, PROMPTS, rounds=1, batch=2, floor=1, clock=ticking(), score=lambda *_: 0.5, **CALL)
    return pipe, found


def test_fidelity_is_that_of_runs_by_hand(measured: tuple[Any, Result]) -> None:
    pipe, found = measured
    plain = [
        tiny.run(pipe, "flux", **{**CALL, "prompt": text, "output_type": "np"}, seed=i)
        for i, text in enumerate(PROMPTS)
    ]
    accelerate(pipe, None, **CACHE)
    ours = [
        tiny.run(pipe, "flux", **{**CALL, "prompt": text, "output_type": "np"}, seed=i)
        for i, text in enumerate(PROMPTS)
    ]
    hits = pipe.acceleration.report.hit_rate
    pipe.acceleration.restore()
    one = found.contender("cached")
    assert one["quality"]["psnr"]["each"] == pytest.approx(
        [psnr(a, b) for a, b in zip(plain, ours, strict=True)], abs=1e-5
    )
    assert hits > 0 and one["computed"]["of"] == 6 and one["computed"]["steps"] < 6
    assert one["hits"]["cond"][0] == 1 and min(one["hits"]["cond"]) < 1
    assert found.contender("fewer")["computed"]["steps"] == 3 and found.contender("fewer")["hits"]["cond"] == [1] * 3
    assert found.contender("plain")["quality"]["psnr"]["identical"] == 2
    assert one["quality"]["score"]["mean"] == 0.5 and one["repeatable"] and one["faults"] == [None, None]


def test_two_plans_are_paired_by_prompt(measured: tuple[Any, Result]) -> None:
    (lead,) = measured[1].document["buckets"][0]["leads"]
    each = [measured[1].contender(name)["quality"]["psnr"]["each"] for name in ("cached", "fewer")]
    assert (lead["of"], lead["over"]) == ("cached", "fewer")
    assert lead["psnr_db"] == pytest.approx(np.subtract(*each).mean(), abs=1e-3)
    assert "PSNR of cached over fewer" in str(measured[1])


def test_times_are_those_of_the_given_clock(measured: tuple[Any, Result]) -> None:
    one = measured[1].contender("cached")
    assert one["latency_s"]["median"] == 0.5 and one["latency_s"]["each"] == [[0.5, 0.5]]
    assert one["speed"]["median"] == 1 and one["throughput"]["pictures_per_s"] == 4  # two pictures in half a second
    assert one["start"] == {"attach_s": 0.5, "first_run_s": 0.5, "beyond_usual_s": 0.0}
    assert set(one["stages_s"]) == {"encode", "denoise", "decode"} and len(one["steps_s"]) == 6
    assert one["memory"]["weights_bytes"] == sum(
        t.numel() * t.element_size()
        for _, module in tiny.component_modules(measured[0])
        for t in (*module.parameters(), *module.buffers())
    )
    assert one["memory"]["cache_bytes"] > 0 == measured[1].contender("plain")["memory"]["cache_bytes"]


def test_the_noise_floor_stands_beside_the_table(measured: tuple[Any, Result]) -> None:
    floor = measured[1].document["buckets"][0]["floor"]
    assert set(floor["ways"]) == {"batch of two", "math attention"} and floor["prompts"] == 1
    psnr_db = floor["quality"]["psnr"]["mean"]
    assert psnr_db is None or psnr_db > 80  # float32: rounding alone; None: bit-equal
    assert "(noise floor)" in str(measured[1])


def test_document_table_and_page_hold_everything_and_need_nothing(measured: tuple[Any, Result], tmp_path: Any) -> None:
    found = measured[1]
    files = found.save(tmp_path)
    assert read(files["json"]) == json.loads(json.dumps(found.to_dict()))
    page = Path(files["html"]).read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page
    assert page.count("<svg") >= 9 and page.count("data:image/png;base64,") == 2 * 5  # plain, 2 others, 2 differences
    for word in ("cache.interval", "(noise floor)", "torch", "red ring", "difference x"):
        assert word in page
    assert "cached" in str(found) and "fewer" in found._repr_html_()


def test_a_pipeline_that_was_accelerated_is_so_again_and_nothing_else_stays() -> None:
    pipe = tiny.build("flux")
    tiny.run(pipe, "flux", **CALL)  # what a plain call itself leaves behind
    before = fingerprint.snapshot_pipe(pipe)
    state = torch.random.get_rng_state()
    bench(pipe, [{"steps": 2, "scheduler": "own"}, CACHE], PROMPTS[:1], rounds=1, floor=0, clock=ticking(), **CALL)
    assert not hasattr(pipe, "acceleration") and torch.equal(state, torch.random.get_rng_state())
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    accelerate(pipe, None, **CACHE)
    handle = pipe.acceleration
    bench(pipe, [None], PROMPTS[:1], rounds=1, floor=0, clock=ticking(), **CALL)
    assert pipe.acceleration is handle and pipe.acceleration.plan.enabled == ("cache.interval",)


def test_a_plan_that_fails_in_its_first_run_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.build("flux")
    lap = Arena.lap

    def no_room(self: Arena, contender: Any, *args: Any, **kwargs: Any) -> Any:
        if contender.name == "big":
            raise torch.OutOfMemoryError("no room for 3 GiB")
        return lap(self, contender, *args, **kwargs)

    monkeypatch.setattr(Arena, "lap", no_room)
    found = bench(pipe, {"big": CACHE, "fewer": {"steps": 2}}, PROMPTS[:1], rounds=1, floor=0, clock=ticking(), **CALL)
    assert "no room for 3 GiB" in found.contender("big")["refused"] and "no room" in str(found)
    assert found.contender("fewer")["computed"]["steps"] == 2 and not hasattr(pipe, "acceleration")
    found.page()


def test_buckets_are_apart() -> None:
    found = bench(
        tiny.build("flux"), [CACHE], PROMPTS[:1], rounds=1, floor=0, clock=ticking(), sizes=[(8, 8), (16, 24)], **CALL
    )
    assert [bucket["size"] for bucket in found.document["buckets"]] == ["8x8", "16x24"]
    assert [found.pictures[size]["plain"].shape for size in found.pictures] == [(1, 8, 8, 3), (1, 24, 16, 3)]
    small, large = (bucket["contenders"][1]["quality"] for bucket in found.document["buckets"])
    assert "ms_ssim" in large and "ms_ssim" not in small  # below 11 pixels


def test_videos_are_measured_in_time_too() -> None:
    call = tiny.call_kwargs("wan")
    for name in ("prompt", "generator", "output_type"):
        call.pop(name)
    found = bench(tiny.build("wan"), {"cached": CACHE}, PROMPTS[:1], rounds=1, floor=0, clock=ticking(), **call)
    assert {"motion_psnr", "flicker_rise"} <= set(found.contender("cached")["quality"])
    assert found.document["buckets"][0]["size"] == "32x32x5" and found.page().count("data:image/png") == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plans": [{"cache": "first_blok"}]}, "first_block"),
        ({"plans": [{"cache": None}]}, "switches nothing on"),
        ({"prompts": []}, "prompts must be"),
        ({"rounds": 0}, "rounds must be"),
        ({"sizes": [(8,)]}, "a size is"),
        ({"level": 90.0}, "probability"),
        ({"heigth": 8}, "height"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(given: dict[str, Any], said: str) -> None:
    pipe = tiny.build("flux")
    pipe.transformer.forward = lambda *_, **__: pytest.fail("something ran")
    with pytest.raises(InvalidOptionError, match=said) as refusal:
        bench(pipe, **{"plans": [CACHE], "prompts": PROMPTS, **given})
    assert len(str(refusal.value)) <= 300


def test_different_pictures_of_one_seed_are_said() -> None:
    pipe = tiny.build("flux")
    counted = itertools.count()
    pipe.vae.post_quant_conv = torch.nn.Identity() if pipe.vae.post_quant_conv is None else pipe.vae.post_quant_conv
    decode = pipe.vae.decode
    pipe.vae.decode = lambda z, **kwargs: decode(z + 0.01 * next(counted), **kwargs)
    found = bench(pipe, [CACHE], PROMPTS[:1], rounds=1, floor=0, clock=ticking(), **CALL)
    assert not found.contender("plain")["repeatable"] and "different pictures" in str(found)
    assert np.isfinite(found.contender("plain")["latency_s"]["median"])


def test_a_compiled_plan_runs_once_uncounted_whenever_it_is_put_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who ends a round begins the next, so that nobody is put on twice in a row. Here a cache counts as what must
    settle: compiling takes seconds."""
    ran: list[str] = []
    lap = Arena.lap

    def seen(self: Arena, contender: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(contender.name)
        return lap(self, contender, *args, **kwargs)

    monkeypatch.setattr(Arena, "lap", seen)
    monkeypatch.setattr("diffaccel.bench.tally._SETTLES", ("cache.interval",))
    found = bench(tiny.build("flux"), {"c": CACHE}, PROMPTS[:1], rounds=2, floor=0, clock=ticking(), **CALL)
    each_round = ["plain", "c", "c", "c", "plain"]  # the first of the three is not counted
    assert ran == ["plain", "plain", "c", *each_round, *each_round]  # plain, plain watched, the first of c
    assert [len(pair) for pair in found.contender("c")["latency_s"]["each"]] == [2, 2]
    assert found.contender("c")["plan"]["items"]


def test_cpu_seconds_are_named_and_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.build("flux")
    found = bench(pipe, [None], PROMPTS[:1], rounds=1, floor=0, clock=time.process_time, **CALL)
    assert found.document["clock"] == "cpu" and "CPU seconds" in str(found)
    monkeypatch.setattr(type(pipe), "device", torch.device("cuda"))
    with pytest.raises(InvalidOptionError, match="on cuda"):
        bench(pipe, [None], PROMPTS[:1], clock=time.process_time, **CALL)


def test_hit_maps_shade_by_the_share_of_runs() -> None:
    drawn = svg.hit_map({"cond": [1, 0, 0.5], "uncond": [1, 1, 1]})
    fills = re.findall(r'fill="(#[0-9a-f]{6})"><title>', drawn)
    assert fills[:2] == [svg.COMPUTED, svg.CACHED] and fills[2] not in fills[:2] and fills[3:] == [svg.COMPUTED] * 3
    assert "computed in 50% of the runs" in drawn and svg.hit_map({}) == "" == svg.step_bars([])
