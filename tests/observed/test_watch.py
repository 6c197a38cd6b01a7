"""Runs that are watched: progress, ranges of the profiler, metrics, the short table. Off, they cost nothing."""

from __future__ import annotations

import json
import re
import sys
from types import FrameType
from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach, restore
from diffaccel.core.metrics import Totals
from diffaccel.core.observer import Progress
from diffaccel.errors import InvalidOptionError
from tests import tiny

CACHE = {"cache": "interval", "cache_scope": "stack", "cache_min_steps": 0, "cache_last_steps": 0}


def cached(family: str = "flux", **more: Any) -> Any:
    return accelerate(tiny.build(family), None, **CACHE, **more)


# ---- progress ------------------------------------------------------------------------------------------------------


def test_progress_says_what_the_report_says() -> None:
    pipe, seen = cached("wan"), list[Progress]()
    stop = pipe.acceleration.watch.progress(seen.append)
    tiny.run(pipe, "wan", num_inference_steps=6)
    report = pipe.acceleration.report
    assert [(p.step, p.total) for p in seen] == [(n, 6) for n in range(1, 7)]
    assert [p.computed for p in seen] == [s.computed for s in report.steps if s.branch == "cond"]
    assert [p.by for p in seen] == [() if p.computed else ("cache.interval",) for p in seen]
    assert (seen[-1].reused, seen[-1].calls) == (sum(not s.computed for s in report.steps), len(report.steps))
    assert seen[0].seconds_left is None and seen[-1].seconds_left == 0.0
    assert all(p.seconds_left is not None and p.seconds_left >= 0 for p in seen[1:])
    assert [p.seconds for p in seen] == sorted(p.seconds for p in seen)
    stop()
    tiny.run(pipe, "wan", num_inference_steps=2)
    assert len(seen) == 6


def test_progress_estimates_fidelity_where_a_cache_compares() -> None:
    pipe, seen = accelerate(tiny.build("flux"), None, cache="first_block", cache_min_steps=0), list[float | None]()
    pipe.acceleration.watch.progress(lambda progress: seen.append(progress.forecast_error))
    tiny.run(pipe, "flux", num_inference_steps=6)
    errors = [max(s.forecast_error) for s in pipe.acceleration.report.steps if s.forecast_error is not None]
    assert seen[0] is None and seen[-1] == pytest.approx(max(errors))
    plain = attach(tiny.build("flux"))
    plain.acceleration.watch.progress(lambda progress: seen.append(progress.forecast_error))
    tiny.run(plain, "flux", num_inference_steps=2)
    assert seen[-2:] == [None, None]


def test_watching_changes_no_bit_and_an_error_in_a_callback_leaves_nothing() -> None:
    pipe = cached()
    plain = tiny.run(pipe, "flux")

    def fail(progress: Progress) -> None:
        if progress.step == 3:
            raise RuntimeError("stop")

    stop = pipe.acceleration.watch.progress(fail)
    with pytest.raises(RuntimeError, match="stop"):
        tiny.run(pipe, "flux")
    stop()
    with pipe.acceleration.watch.profiling():
        assert tiny.run(pipe, "flux").equal(plain)
    assert tiny.run(pipe, "flux").equal(plain)
    with pytest.raises(InvalidOptionError, match="function of one argument"):
        pipe.acceleration.watch.progress(3)


def test_a_resumed_run_is_told_of_the_steps_that_it_runs() -> None:
    pipe, seen, kept = cached(), list[int](), list[Any]()

    def pause(inner: Any, index: int, timestep: Any, tensors: Any) -> Any:
        if index == 2 and not kept:
            kept.append(pipe.acceleration.snapshot())
        return {}

    tiny.run(pipe, "flux", callback_on_step_end=pause)
    pipe.acceleration.watch.progress(lambda progress: seen.append(progress.step))
    pipe.acceleration.resume(kept[0])
    assert seen == [4, 5, 6]


# ---- ranges of the profiler ----------------------------------------------------------------------------------------


def ranges_of(pipe: Any, family: str) -> list[Any]:
    with pipe.acceleration.watch.profiling(), torch.profiler.profile() as profile:
        tiny.run(pipe, family, num_inference_steps=4)
    return [event for event in profile.events() if event.name.startswith("diffaccel.")]


def test_ranges_have_the_names_of_stage_step_block_and_lever() -> None:
    pipe = cached()
    before = [set(vars(module)) for module in pipe.transformer.modules()]
    events = ranges_of(pipe, "flux")
    names = [event.name.removeprefix("diffaccel.") for event in events]
    for stage in ("encode", "denoise", "decode"):
        assert names.count(stage) == 1
    assert [name for name in names if name.startswith("step")] == [f"step {n}" for n in range(4)]
    assert names.count("call transformer cond") == 4
    reused = sum(not step.computed for step in pipe.acceleration.report.steps)
    assert names.count("reused cache.interval") == reused > 0 and "lever cache.interval" in names
    assert names.count("block transformer.transformer_blocks.0") == 4
    spans = {name: event.time_range for name, event in zip(names, events, strict=True)}
    outer, step = spans["denoise"], spans["step 1"]
    assert outer.start <= step.start and step.end <= outer.end
    assert [set(vars(module)) for module in pipe.transformer.modules()] == before
    assert not any(module._forward_hooks for module in pipe.transformer.modules())


def test_ranges_end_where_a_run_raises() -> None:
    pipe = cached()

    def fail(*_: Any) -> Any:
        raise RuntimeError("stop")

    with pipe.acceleration.watch.profiling():
        with pytest.raises(RuntimeError, match="stop"):
            tiny.run(pipe, "flux", callback_on_step_end=fail)
        with torch.profiler.profile() as profile:
            tiny.run(pipe, "flux", num_inference_steps=2)
    names = [event.name for event in profile.events()]
    assert names.count("diffaccel.step 0") == 1
    root = pipe.acceleration.stack.roots["transformer"]
    assert not any(type(one).__name__ == "TimedListener" for one in root.listeners)


def test_without_watching_there_is_no_range() -> None:
    pipe = cached()
    with torch.profiler.profile() as profile:
        tiny.run(pipe, "flux", num_inference_steps=2)
    assert not [event for event in profile.events() if event.name.startswith("diffaccel.")]


# ---- what it costs, counted ----------------------------------------------------------------------------------------


def calls_in_a_run(pipe: Any) -> int:
    """All Python calls of one run of ten steps on the image testbed, the libraries' own included."""
    from diffaccel import testbed

    count = [0]

    def seen(frame: FrameType, event: str, _: Any) -> None:
        count[0] += event == "call"

    generator, prompt = torch.Generator().manual_seed(0), testbed.prompts("test", 1)
    sys.setprofile(seen)
    try:
        pipe(prompt, num_inference_steps=10, generator=generator, **testbed.call_kwargs("image"))
    finally:
        sys.setprofile(None)
    return count[0]


def test_watching_costs_at_most_one_percent_of_a_step() -> None:
    """Progress after every step and the metrics of the run, against the same runs unwatched; off, it costs nothing."""
    from diffaccel import testbed

    pipe = attach(testbed.load("image"))
    pipe.set_progress_bar_config(disable=True)
    calls_in_a_run(pipe)  # what happens once
    plain = calls_in_a_run(pipe)
    last: list[Progress] = []
    stop = pipe.acceleration.watch.progress(last.append)
    watched = calls_in_a_run(pipe)
    stop()
    assert calls_in_a_run(pipe) == plain
    assert last[-1].step == 10 and 0 < watched - plain <= 0.01 * plain, (plain, watched)


def test_ranges_cost_at_most_one_percent_of_a_step() -> None:
    from diffaccel import testbed

    pipe = attach(testbed.load("image"))
    pipe.set_progress_bar_config(disable=True)
    calls_in_a_run(pipe)
    plain = calls_in_a_run(pipe)
    with pipe.acceleration.watch.profiling():
        more = calls_in_a_run(pipe) - plain
    assert 0 < more <= 0.01 * plain, (plain, more)


# ---- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_are_the_reports_numbers() -> None:
    pipe = cached("wan")
    tiny.run(pipe, "wan", num_inference_steps=6)
    report = pipe.acceleration.report
    found = report.metrics()
    assert found["steps"] == 6 and found["calls_computed"] + found["calls_reused"] == len(report.steps)
    assert found["hit_rate"] == report.hit_rate and found["denoise_s"] == report.stages["denoise"]
    assert found["run_s"] == pytest.approx(report.seconds) and found["completed"] == 1
    assert found["call_reused_s"] < found["call_computed_s"]
    json.dumps(found, allow_nan=False)


LINE = re.compile(
    r'^[a-zA-Z_:][\w:]*(\{\w+="(\\.|[^"\\\n])*"(,\w+="(\\.|[^"\\\n])*")*\})? [-+]?(\d[\d.e+-]*|Inf|NaN)$'
)


def test_the_text_is_openmetrics() -> None:
    """By the grammar of OpenMetrics 1.0: types before samples, one group per family, counters end in _total."""
    pipe, totals = cached(), Totals({"pipeline": 'a "quoted"\nname'})
    computed = 0
    for steps in (2, 4):
        tiny.run(pipe, "flux", num_inference_steps=steps)
        totals.add(pipe.acceleration.report)
        computed += sum(step.computed for step in pipe.acceleration.report.steps)
    text = totals.openmetrics()
    assert text.endswith("# EOF\n") and text.count("# EOF") == 1
    types: dict[str, str] = {}
    current = ""
    for line in text.splitlines()[:-1]:
        if line.startswith("#"):
            _, word, family, rest = line.split(" ", 3)
            if word == "TYPE":
                assert family not in types
                types[family], current = rest, family
            assert family == current
            assert word != "UNIT" or family.endswith(f"_{rest}")
            continue
        assert LINE.match(line), line
        name = re.split(r"[ {]", line)[0]
        assert name == (f"{current}_total" if types[current] == "counter" else current)
    assert 'diffaccel_runs_total{pipeline="a \\"quoted\\"\\nname"} 2' in text
    assert re.search(rf'diffaccel_denoiser_calls_total\{{.*kind="computed"\}} {computed}\n', text)
    assert "diffaccel_stage_seconds" in pipe.acceleration.report.openmetrics()


# ---- the table -----------------------------------------------------------------------------------------------------


def test_the_table_is_short_and_the_details_have_the_rest() -> None:
    pipe = cached(attention="flex", cache_order=1)
    text = str(pipe.acceleration)
    assert "unmeasured" in text and "interval=" not in text
    assert [word for word in text.splitlines()[1].split()] == ["item", "state", "gain", "reason"]
    assert max(map(len, text.splitlines())) <= 160
    tiny.run(pipe, "flux", num_inference_steps=8)
    assert re.search(r"cache\.interval +enabled +\d+% reused", str(pipe.acceleration))
    details = str(pipe.acceleration.details)
    assert re.search(r"interval +2", details) and re.search(r"order +1", details) and "attention.flex" in details
    for name in pipe.acceleration.plan.item("cache.interval").params:
        assert f"  {name} " in details
    html = pipe.acceleration._repr_html_()
    assert html.count("<table>") == 2 and "<details>" in html
    restore(pipe)
    assert "nothing is on" in str(attach(tiny.build("flux")).acceleration)


def test_a_measured_gain_is_shown() -> None:
    pipe = cached()
    pipe.acceleration.measure(
        "red ring",
        **{k: v for k, v in tiny.call_kwargs("flux").items() if k in ("height", "width", "max_sequence_length")},
        num_inference_steps=4,
    )
    assert re.search(r"cache\.interval +enabled +\d+\.\d\dx, \d+\.\d dB", str(pipe.acceleration))


def test_ranges_go_with_offload_and_a_cache_that_skips_blocks() -> None:
    options = {"cache": "first_block", "cache_threshold": 1e9, "cache_min_steps": 0}
    offload = {"offload": "layerwise", "offload_store": "disk", "offload_resident_layers": 1}
    pipe = accelerate(tiny.build("flux"), None, strict=True, **options, **offload)
    plain = tiny.run(pipe, "flux")
    names = [event.name for event in ranges_of(pipe, "flux")]
    assert "diffaccel.lever cache.first_block" in names
    with pipe.acceleration.watch.profiling():
        assert tiny.run(pipe, "flux").equal(plain)
    assert tiny.run(restore(pipe), "flux").equal(tiny.run(tiny.build("flux"), "flux"))
