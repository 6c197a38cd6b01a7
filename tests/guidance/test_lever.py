"""The lever as a plan item: its options, what it says before and after, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from diffaccel import Plan, accelerate, attach, plan, restore
from diffaccel.errors import IncompatibleError, InvalidOptionError, UnsupportedModelError
from diffaccel.guidance.reuse import GuidanceReuse
from tests import fingerprint, tiny
from tests.models.families.table import build as build_family

from .helpers import FREE, done, reuse

BAD: list[tuple[dict[str, Any], str]] = [
    ({"interval": 0}, "interval must be a whole number of at least 1, got 0"),
    ({"interval": 2.0}, "interval must be a whole number"),
    ({"interval": True}, "interval must be a whole number"),
    ({"order": 3}, "order must be 0, 1 or 2, got 3"),
    ({"order": True}, "order must be 0, 1 or 2"),
    ({"first_steps": -1}, "first_steps must be"),
    ({"last_steps": None}, "last_steps must be"),
    ({"min_steps": "9"}, "min_steps must be"),
    ({"start": 0.6, "end": 0.4}, "0 <= start <= end <= 1"),
    ({"start": -0.1}, "0 <= start"),
    ({"end": 1.5}, "end <= 1"),
    ({"end": float("nan")}, "end must be a number"),
    ({"start": None}, "start must be a number"),
    ({"sigma_low": "0.2"}, "sigma_low must be a number"),
    ({"sigma_low": 0.9, "sigma_high": 0.1}, "sigma_low=0.9 is above"),
    ({"coordinate": "time"}, "coordinate must be one of step, sigma"),
    ({"schedule": "0101"}, "begin it with 1"),
    ({"schedule": "1x01"}, "only 0 and 1"),
    ({"schedule": ""}, "only 0 and 1"),
    ({"schedule": []}, "schedule must be"),
    ({"schedule": [0, 2.5]}, "schedule must be"),
    ({"schedule": len}, "schedule must be"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        GuidanceReuse(**options)


def test_bad_options_through_accelerate() -> None:
    """Refused before anything is touched; a name of the pipeline's call is no option of the lever."""
    pipe = tiny.build("sdxl")
    before = fingerprint.snapshot_pipe(pipe)
    for wishes in (
        {"guidance": "reuse", "guidance_interval": 0},
        {"guidance": "reuse", "guidance_scale": 4.0},
        {"guidance": "reuse", "guidance_threshold": 0.1},
        {"guidance": "resue"},
        {"guidance": True},
        {"guidance_interval": 2},
        {"guidance_scale": 4.0},
    ):
        with pytest.raises(InvalidOptionError):
            accelerate(pipe, preset=None, **wishes)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_the_plan_says_what_it_does() -> None:
    pipe = tiny.build("sd3")
    item = plan(pipe, preset=None, guidance="reuse").items[0]
    assert (item.name, item.slot, item.status, item.fidelity) == ("guidance.reuse", "call", "enabled", "lossy")
    assert "one step of 2" in item.reason and "fewer than 9 steps" in item.reason
    found = {key: value for key, value in item.predicted.items() if key not in ("gain", "how")}
    assert found == {"unconditional_skipped": 0.5, "denoiser_work_skipped": 0.25, "origin": "computed"}
    with pytest.raises(UnsupportedModelError, match="FluxFillPipeline takes no negative prompt"):
        accelerate(build_family("flux_fill"), preset=None, guidance="reuse", strict=True)


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        ({"interval": 1}, 0.0),
        ({"interval": 4}, 0.75),
        ({"interval": 1, "start": 0.25, "end": 0.75}, 0.5),
        ({"interval": 2, "end": 0.5}, 0.75),
        ({"schedule": "1101_0000"}, 0.625),
        ({"schedule": [0, 3]}, None),
    ],
)
def test_prediction(options: dict[str, Any], skipped: float | None) -> None:
    found = GuidanceReuse(**options).predict(None)  # type: ignore[arg-type]
    assert found.get("unconditional_skipped") == skipped
    assert found["origin"] == ("unmeasured" if skipped is None else "computed")


def test_a_plan_survives_toml() -> None:
    """Also its schedule; and the plan does on a new pipeline what it did on the old one."""
    pipe = reuse(tiny.build("sdxl"), schedule=[0, 1, -1], order=1, sigma_high=10.0)
    result = tiny.run(pipe, "sdxl")
    again = Plan.from_toml(pipe.acceleration.plan.to_toml())
    assert torch.equal(tiny.run(accelerate(tiny.build("sdxl"), again), "sdxl"), result)
    assert tuple(again.items[0].params["schedule"]) == (0, 1, -1)


def test_verbs() -> None:
    """Enable, reconfigure, disable; each returns the pipe, and nothing is left."""
    pipe = tiny.build("sdxl")
    reference = tiny.run(pipe, "sdxl")
    before = fingerprint.snapshot_pipe(pipe)
    attach(pipe)
    assert pipe.enable_guidance_cache(interval=3, **FREE) is pipe
    assert not torch.equal(tiny.run(pipe, "sdxl"), reference) and done(pipe) == (2, 4, 0)
    assert pipe.acceleration.plan.items[0].measured["steps_reuse"] == 4
    assert pipe.enable_guidance_cache(interval=2, **FREE) is pipe
    tiny.run(pipe, "sdxl")
    assert done(pipe) == (3, 3, 0)
    with pytest.raises(InvalidOptionError):
        pipe.enable_guidance_cache(scale=3.0)
    assert pipe.disable_guidance_cache() is pipe
    assert torch.equal(tiny.run(pipe, "sdxl"), reference)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_budget() -> None:
    item = plan(tiny.build("sdxl"), "lossless", guidance="reuse").item("guidance.reuse")
    assert item.status == "skipped" and "lossy" in item.reason


def test_diffusers_own_cache() -> None:
    """It counts calls: refused where it is on already, and where it is switched on later the lever sits out."""
    pipe = tiny.build("wan")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    reference = tiny.run(pipe, "wan")
    with pytest.raises(IncompatibleError, match="diffusers' own cache"):
        accelerate(pipe, preset=None, guidance="reuse", strict=True)
    late = reuse(tiny.build("wan"))
    late.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    assert torch.equal(tiny.run(late, "wan"), reference)
    assert any("diffusers' own cache is on" in note for note in late.acceleration.report.notes)


def test_a_model_without_a_card() -> None:
    pipe = tiny.build("sdxl")
    pipe.unet.register_to_config(addition_embed_type="text")
    item = plan(pipe, preset=None, guidance="reuse").items[0]
    assert item.status == "skipped" and "which of a step's calls is the unconditional one" in item.reason
