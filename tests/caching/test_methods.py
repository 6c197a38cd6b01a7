"""Every published method on every family: the steps it computes, what it leaves behind, or the reason why not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from diffaccel.caching.engine import Engine
from diffaccel.caching.gates.base import ProbeGate
from diffaccel.caching.methods import METHODS
from diffaccel.caching.scopes.stack import Stack
from tests.models.families.table import FAMILIES, build, run

from .coverage import COVERED, OPTIONS, SECOND_ANEW, skipped_because, steps_aside

STEPS = 5
# What each method must do with the options of `coverage.OPTIONS` in five steps: C computed, . reused.
STRIP = {
    "adacache": "CC..C",  # two steps measure one change, which buys three steps
    "adaptive": "CC.CC",  # the first two are always computed, and gaps begin with one step
    "custom": "C.C.C",  # at most one reused step in a row
    "dbcache": "C....",  # a threshold of 1 reuses untested behind the warm-up
    "delta_dit": "C.C.C",
    "dicache": "C....",
    "easycache": "CC...",  # a rate needs two computed steps
    "first_block": "C....",
    "interval": "C.C.C",
    "magcache": "C...C",  # ratios of 1 never drift, so the cap of three rules
    "schedule": "C.C..",
    "seacache": "C..C.",  # at most two in a row
    "taylorseer": "C.C.C",
    "teacache": "C...C",  # the reference computes the last step
}
FAST = {  # of each method, the families that `make test` covers; `make test-all` covers all
    "wan22": {"adacache", "first_block", "interval", "magcache"},
    "flux_cfg": set(STRIP),
    "sd3": {"delta_dit", "easycache", "first_block", "interval", "schedule", "teacache"},
    "ltx": {"dicache", "seacache", "taylorseer"},
    "z_image": {"dbcache", "easycache", "interval", "schedule"},
    "mochi": {"first_block", "interval"},
    "flux2": {"custom", "delta_dit"},
    "flux_controlnet": {"interval", "schedule"},
}
# A call without the attention between picture and sound, whose modules are therefore not all there to be remembered.
PARTIAL = {("interval", "ltx2"): ("uncond_modality", "leave out some of the blocks' modules")}

Outputs = tuple[torch.Tensor, ...]


@functools.cache
def pipeline(family: str) -> Any:
    return build(family)


def latents(family: str) -> Outputs:
    return run(pipeline(family), family, num_inference_steps=STEPS)


@functools.cache
def plain(family: str) -> Outputs:
    return latents(family)


def same_bits(found: Outputs, wanted: Outputs) -> bool:
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def lines(report: Any) -> dict[tuple[str, str], list[Any]]:
    """The records of each denoiser and branch, in order."""
    found: dict[tuple[str, str], list[Any]] = {}
    for step in report.steps:
        found.setdefault((step.component, step.branch), []).append(step)
    return found


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, int]]:
    """Every tensor that an engine remembers, with how often it had been written to by then."""
    seen: list[tuple[torch.Tensor, int]] = []
    original = Engine.store

    def store(self: Engine, values: tuple[torch.Tensor, ...]) -> None:
        seen.extend((value, value._version) for value in values)
        original(self, values)

    monkeypatch.setattr(Engine, "store", store)
    return seen


def computed_of(records: list[Any], strip: str, method: str) -> list[bool]:
    """What a line must look like: its denoiser's first step is computed, whatever the loop's schedule says."""
    wanted = [strip[step.index] == "C" for step in records]
    if records[0].index > 0 and method in ("adacache", "custom", "dbcache", "easycache", "seacache"):
        wanted = [mark == "C" for mark in strip[: len(records)]]  # what counts from this denoiser's own first step
    wanted[0] = True
    return wanted


PAIRS = [
    pytest.param(method, family, marks=[] if method in FAST.get(family, ()) else [pytest.mark.slow])
    for family in sorted(FAMILIES)
    for method in sorted(STRIP)
]


def test_every_method_has_an_expected_strip() -> None:
    assert set(STRIP) >= set(METHODS) - {"deepcache"}  # U-Nets only: test_deepcache.py
    assert set().union(*FAST.values()) == set(STRIP)


@pytest.mark.parametrize(("method", "family"), PAIRS)
def test_method_on_family(method: str, family: str, remembered: list[tuple[torch.Tensor, int]]) -> None:
    wanted = plain(family)  # before anything is attached
    pipe = pipeline(family)
    accelerate(pipe, preset=None, cache=method, **COVERED, **OPTIONS[method])
    try:
        [item] = [item for item in pipe.acceleration.plan.items if item.name == f"cache.{method}"]
        found = latents(family)
        report = pipe.acceleration.report
    finally:
        restore(pipe)
    assert report.cache_bytes_held == 0
    expected_reason = skipped_because(method, family)
    stands_down = steps_aside(method, family)
    if expected_reason is not None:
        assert item.status == "skipped" and expected_reason in item.reason
        assert report.cache_bytes_peak == 0
    else:
        assert item.status == "enabled" and item.reason
    if expected_reason is not None or stands_down:
        assert report.hit_rate == 0 and same_bits(found, wanted)
        assert expected_reason is not None or any(stands_down in note for note in report.notes)
    else:
        check_hits(method, family, report)
        assert not same_bits(found, wanted), "reused steps change the picture"
        assert remembered and all(value._version == before for value, before in remembered), "written to later"
    assert same_bits(latents(family), wanted), "restore"


def check_hits(method: str, family: str, report: Any) -> None:
    """The strip of every branch, forecast errors where there was anything to forecast from, memory while it ran."""
    assert [name for _, name in lines(report)][: len(FAMILIES[family].branches)] == list(FAMILIES[family].branches)
    assert report.cache_bytes_peak > 0
    partial, why = PARTIAL.get((method, family), ("", ""))
    assert any(why in note for note in report.notes) or not partial
    for (_, branch), records in lines(report).items():
        if branch == partial:
            assert all(step.computed and step.forecast_error is None for step in records)
            continue
        fresh = (0, 1) if family in SECOND_ANEW else (0,)
        expected = computed_of(records, STRIP[method], method)
        anew = (*fresh, 2) if method == "easycache" else fresh  # whose estimate needs two computed steps
        if len(fresh) > 1:
            expected = [c or at in anew for at, c in enumerate(expected)]
            if method == "adaptive":  # begins anew with the second step
                expected = [True, True, True, False, True]
        if method == "adaptive":
            expected[-1] = records[-1].computed  # reused where its forecast costs little
        assert [step.computed for step in records] == expected, branch
        for place, step in enumerate(records):
            if step.computed and place not in fresh:
                assert step.forecast_error is not None and all(error >= 0 for error in step.forecast_error)
            else:
                assert step.forecast_error is None


def test_another_threshold_gives_another_strip() -> None:
    """Negative control: the strips are the gates' doing."""
    pipe = pipeline("flux_cfg")
    gate = ProbeGate(1e-12)
    accelerate(pipe, preset=None, cache="custom", cache_gate=gate, cache_scope=Stack(1), **COVERED)
    try:
        latents("flux_cfg")
        assert set(pipe.acceleration.report.strip().values()) == {"CCCCC"}
    finally:
        restore(pipe)
