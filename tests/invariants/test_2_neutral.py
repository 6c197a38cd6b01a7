"""Invariant 2: a lever at its neutral setting is bit-equal to plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate, attach
from tests import tiny

from .levers import CACHES, accelerated, cache_options, item, pattern, plain

CALLS: dict[str, list[dict[str, Any]]] = {
    "flux": [{}, {"true_cfg": True}, {"prompt": [*tiny.PROMPTS[:2]]}],
    "wan": [{}, {"guidance_scale": 1.0}],
    "sd3": [{}, {"guidance_scale": 1.0}],
    "sdxl": [{}, {"guidance_scale": 1.0}],
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_attach_only(family: str) -> None:
    """Attaching the verbs changes no bit, on no kind of call."""
    pipe = attach(tiny.build(family))
    for call in CALLS[family]:
        assert torch.equal(tiny.run(pipe, family, **call), plain(family, **call)), call


@pytest.mark.parametrize("family", CACHES)
def test_threshold_zero(family: str) -> None:
    """Threshold 0 computes every step and is bit-equal, run after run."""
    pipe = accelerated(family, "cache", cache_threshold=0.0)
    for call in CALLS[family]:
        assert torch.equal(tiny.run(pipe, family, **call), plain(family, **call)), call
        assert all(pattern(pipe)) and pipe.acceleration.report.hit_rate == 0
    assert torch.equal(tiny.run(pipe, family), plain(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_everything_none(family: str) -> None:
    """cache=None and attention=None are nothing at all."""
    pipe = accelerate(tiny.build(family), preset=None, cache=None, attention=None)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    assert not [entry.name for entry in pipe.acceleration.plan.items if entry.status == "enabled"]


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_the_default_backend_chosen_by_name(family: str) -> None:
    """The backend that is in use anyway, chosen by name, changes no bit."""
    pipe = accelerate(tiny.build(family), preset=None, attention="native")
    assert torch.equal(tiny.run(pipe, family), plain(family))
    assert item(pipe.acceleration.plan, "attention").reason


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_presets_lossless(family: str) -> None:
    """The preset that promises no loss: whatever it enables on a CPU is equal to rounding."""
    pipe = accelerate(tiny.build(family), "lossless")
    enabled = [entry for entry in pipe.acceleration.plan.items if entry.status == "enabled"]
    assert all(entry.fidelity in ("exact", "equivalent") for entry in enabled), enabled
    result, reference = tiny.run(pipe, family), plain(family)
    if all(entry.fidelity == "exact" for entry in enabled):
        assert torch.equal(result, reference)
    torch.testing.assert_close(result, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_global_random_state(family: str) -> None:
    """Without a generator torch's global one is drawn from, by us as little as by nobody."""
    pipes = tiny.build(family), accelerated(family, "cache", cache_threshold=0.0)
    results, states = [], []
    with torch.random.fork_rng(devices=[]):
        for pipe in pipes:
            torch.manual_seed(11)
            results.append(tiny.run(pipe, family, generator=None))
            states.append(torch.get_rng_state())
    assert torch.equal(*results) and torch.equal(*states)


@pytest.mark.parametrize("family", CACHES)
def test_negative_control(family: str) -> None:
    """The comparison can fail: a large threshold does change the output."""
    pipe = accelerated(family, "cache", **{"cache_threshold": 1e9})
    assert not torch.equal(tiny.run(pipe, family), plain(family))
    assert pipe.acceleration.report.hit_rate > 0.5
    assert cache_options(family)["cache_threshold"] > 0
