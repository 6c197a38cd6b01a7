"""A regression is what is worse beyond interval and margin, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from diffaccel.bench.against import changes
from diffaccel.errors import InvalidOptionError


def document(
    speed: float = 1.5, wide: float = 0.02, psnr: float = 40.0, steps: float = 14, seed: int = 0
) -> dict[str, Any]:
    """Two contenders, eight prompts whose difficulty is the same in all documents."""
    each = (psnr + np.random.default_rng(0).normal(0, 5, 8) + np.random.default_rng(seed).normal(0, 0.01, 8)).tolist()
    quality = {"psnr": {"each": each}, "ms_ssim": {"each": [0.99] * 8}}
    ours = {
        "name": "fast", "baseline": False, "refused": None, "faults": [None] * 8, "quality": quality,
        "speed": {"median": speed, "interval": [speed * (1 - wide), speed * (1 + wide)]},
        "computed": {"each": [steps] * 8},
    }  # fmt: skip
    plain = {**ours, "name": "plain", "baseline": True}
    return {
        "prompts": ["a"] * 8, "seeds": list(range(8)), "call": {}, "level": 0.9,
        "buckets": [{"size": "64x64", "contenders": [plain, ours]}],
    }  # fmt: skip


def worse(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [change.figure for change in changes(before, now) if change.worse]


@pytest.mark.parametrize(
    ("now", "figures"),
    [
        ({}, []),
        ({"speed": 1.3}, ["speed"]),
        ({"speed": 1.48}, []),  # within the margin
        ({"speed": 1.3, "wide": 0.3}, []),  # beyond the margin, within its own interval
        ({"speed": 2.0}, []),  # better
        ({"psnr": 39.5, "seed": 1}, ["psnr"]),  # a tenth of the spread over prompts, but paired it is sure
        ({"psnr": 39.95, "seed": 1}, []),  # sure, and nothing to speak of
        ({"psnr": 45.0}, []),
        ({"steps": 16}, ["computed steps"]),
        ({"steps": 12}, []),
    ],
)
def test_what_counts_as_a_regression(now: dict[str, Any], figures: list[str]) -> None:
    assert worse(document(), document(**now)) == figures


def test_other_prompts_are_not_paired() -> None:
    other = document(psnr=39.5, seed=1)
    other["prompts"] = ["b"] * 8
    assert worse(document(), other) == []
    far = document(psnr=25.0)
    far["prompts"] = ["b"] * 8
    assert worse(document(), far) == ["psnr"]


def test_speeds_of_different_clocks_are_not_compared() -> None:
    slow = {**document(speed=1.0), "clock": "cpu"}
    assert worse(document(), slow) == [] and worse({**document(), "clock": "cpu"}, slow) == ["speed"]


def test_identical_pictures_count_as_100_db_and_broken_ones_as_nothing() -> None:
    same, broken = document(), document()
    for bucket, faults in ((same, [None] * 8), (broken, ["nan"] * 8)):
        one = bucket["buckets"][0]["contenders"][1]
        one["quality"]["psnr"]["each"], one["faults"] = [None] * 8, faults
    assert worse(document(), same) == []
    assert worse(same, document()) == ["psnr"]
    assert set(worse(document(), broken)) == {"psnr", "broken pictures"}


def test_a_plan_that_fails_now_is_a_regression_and_strangers_cannot_be_compared() -> None:
    refused = document()
    refused["buckets"][0]["contenders"][1] = {"name": "fast", "refused": "no room", "baseline": False}
    assert worse(document(), refused) == ["runs"]
    assert "REGRESSION: fast at 64x64: speed 1.5 -> 1" in str(changes(document(), document(speed=1.0))[0])
    other = copy.deepcopy(document())
    other["buckets"][0]["size"] = "8x8"
    with pytest.raises(InvalidOptionError, match="nothing to compare"):
        changes(document(), other)
