"""The shipped strengths on the bundled weights: fidelity and reuse (both repeatable), not speed."""

from __future__ import annotations

import tomllib

import pytest

from diffaccel import presets
from diffaccel.cli.demo import VIDEO_STRENGTHS, demo
from diffaccel.cli.rounds import STRENGTHS


def test_strengths_are_ordered_around_the_preset():
    _, gentle, _, strong = (strength.overrides.get("cache_threshold") for strength in STRENGTHS)
    medium = tomllib.loads(presets("cpu-demo"))["wishes"]["cache_threshold"]
    assert 0 < gentle < medium < strong
    assert [s.overrides["cache_threshold"] for s in VIDEO_STRENGTHS[1:]] == [0.1, 0.2, 0.4]


@pytest.mark.slow
def test_the_preset_is_close_to_plain_and_strength_costs_fidelity():
    document, _ = demo(prompts=4, rounds=1)
    plain, gentle, medium, strong = document["runs"]
    assert medium["psnr"] >= 28  # the aim of cpu-demo
    assert medium["steps_computed"] <= 28 / 1.4  # else 1.4x is out of reach
    assert plain["steps_computed"] > gentle["steps_computed"] > medium["steps_computed"] > strong["steps_computed"]
    assert gentle["psnr"] > medium["psnr"] > strong["psnr"]
    assert medium["score"] >= plain["score"] - 0.1


@pytest.mark.slow
def test_the_video_strengths_are_close_to_plain_in_their_order():
    document, _ = demo(prompts=2, rounds=1, kind="video")
    plain, gentle, medium, strong = document["runs"]
    assert gentle["psnr"] > medium["psnr"] > strong["psnr"]
    assert medium["psnr"] >= 28 and strong["steps_computed"] < plain["steps_computed"]
    assert medium["score"] >= plain["score"] - 0.1
