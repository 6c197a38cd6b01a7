"""`judge`: the same figures as each measure by itself, prompt by prompt, with intervals and faults."""

from __future__ import annotations

import json
import math

import pytest
import torch

from diffaccel import testbed
from diffaccel.errors import InvalidOptionError
from diffaccel.quality import judge, psnr, ssim
from diffaccel.quality.judgement import mean_of
from diffaccel.testbed import evaluate

OURS = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(OURS.shape, generator=torch.Generator().manual_seed(1))
NEAR, FAR = (OURS + 0.01 * NOISE).clamp(0, 1), (OURS + 0.03 * NOISE).clamp(0, 1)


def test_each_prompt_has_what_the_measures_say_by_themselves() -> None:
    found = judge(OURS, NEAR)
    assert found.metrics == ("psnr", "max_error", "colour_shift", "ssim", "ms_ssim")  # 32 pixels, lpips not there
    assert found.values("psnr") == [psnr(OURS[i], NEAR[i]) for i in range(6)]
    assert found.values("ssim") == [ssim(OURS[i], NEAR[i]) for i in range(6)]
    summary = found.summary()["psnr"]
    assert summary["interval"][0] < summary["mean"] < summary["interval"][1] and summary["worst"] <= summary["mean"]
    assert summary["identical"] == 0 and found.faults == (None,) * 6


def test_a_lead_is_paired_by_prompt() -> None:
    lead = judge(OURS, NEAR, ["psnr"]).lead(judge(OURS, FAR, ["psnr"]), "psnr")
    assert lead.mean == pytest.approx(20 * math.log10(3), abs=0.3) and lead.excludes_zero
    same = judge(OURS, FAR, ["psnr"]).lead(judge(OURS, FAR, ["psnr"]), "psnr")
    assert (same.mean, same.low, same.high) == (0, 0, 0)


def test_no_end_of_an_interval_lies_where_no_value_can_be() -> None:
    few = judge(
        OURS[:3], NEAR[:3], ["psnr", "colour_shift"], prompts=["a"] * 3, score=lambda p, _: float(p[0, 0, 0] > 0.2)
    )
    for metric, least, most in (("score", 0, 1), ("colour_shift", 0, math.inf)):
        found = few.interval(metric)
        assert found is not None and least <= found.low <= found.mean <= found.high <= most


def test_identical_and_broken_pictures_are_counted_and_go_into_json() -> None:
    mixed = NEAR.clone()
    mixed[0] = OURS[0]
    mixed[1, 0, 0, 0] = math.nan
    found = judge(OURS, mixed)
    assert found.faults == (None, "nan", None, None, None, None)
    assert found.summary()["psnr"]["identical"] == 1
    json.dumps(found.summary(), allow_nan=False)
    whole = judge(OURS, OURS, ["psnr"])
    assert whole.interval("psnr") is None and whole.summary()["psnr"]["identical"] == 6
    assert mean_of(whole, "psnr") == 100


def test_the_prompt_score_stands_beside_the_reference_s() -> None:
    prompts = testbed.prompts(n=2)
    drawn = [evaluate._draw(text, (64, 64), 0, "image") for text in prompts]
    shown = torch.stack([torch.from_numpy(picture).movedim(-1, 0).float() for picture in drawn])
    swapped = shown.flip(0)  # each shows the other's prompt

    def score(picture: torch.Tensor, prompt: str) -> float:
        return testbed.score(picture[None], [prompt])["score"]

    found = judge(shown, swapped, ["psnr"], prompts=prompts, score=score)
    assert found.values("reference_score") == [1, 1] and max(found.values("score")) < 1
    with pytest.raises(InvalidOptionError, match="1 prompts for 2 pictures"):
        judge(shown, swapped, prompts=prompts[:1], score=score)


def test_videos_have_measures_of_time() -> None:
    found = judge(OURS[None, :4].repeat(2, 1, 1, 1, 1), NEAR[None, :4].repeat(2, 1, 1, 1, 1))
    assert {"motion_psnr", "flicker_rise"} <= set(found.metrics) and len(found.rows) == 2
    with pytest.raises(InvalidOptionError, match="shape"):
        judge(OURS, NEAR[:2])
