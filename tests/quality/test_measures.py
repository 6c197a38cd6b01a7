"""Measures of structure, time, colour and faults against closed forms; each has a case that it must not see."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from diffaccel.errors import InvalidOptionError
from diffaccel.quality import (
    colour_shift,
    compare,
    difference,
    faults,
    flicker,
    flicker_rise,
    motion_psnr,
    ms_ssim,
    ssim,
)
from diffaccel.quality.structure import scales


def pictures(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("side", "count"), [(10, 0), (11, 1), (32, 2), (64, 3), (99, 4), (176, 5), (1024, 5)])
def test_ms_ssim_uses_as_many_scales_as_fit(side: int, count: int) -> None:
    assert scales(side) == count
    if 0 < count < 5:
        ours = pictures(1, 3, side, side)
        assert ms_ssim(ours, ours) == pytest.approx(1, abs=1e-5)


def test_ms_ssim_of_one_scale_is_ssim_and_of_more_forgives_fine_noise() -> None:
    small = pictures(1, 3, 11, 11)
    noisy = (small + 0.1 * pictures(1, 3, 11, 11, seed=1)).clamp(0, 1)
    assert ms_ssim(small, noisy) == pytest.approx(ssim(small, noisy), abs=1e-4)
    smooth = torch.linspace(0, 1, 96).expand(1, 3, 96, 96)
    grainy = (smooth + 0.1 * torch.randn(smooth.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    assert ssim(smooth, grainy) < ms_ssim(smooth, grainy) < 1
    with pytest.raises(InvalidOptionError, match="11x11"):
        ms_ssim(small[..., :8, :8], small[..., :8, :8])


def test_flicker_of_a_ramp_is_none_and_of_jumps_is_their_height() -> None:
    ramp = torch.linspace(0, 0.8, 9)[:, None, None, None].expand(9, 3, 8, 8)
    jumps = torch.tensor([0.4, 0.6] * 4)[:, None, None, None].expand(8, 3, 8, 8)
    assert flicker(ramp) == pytest.approx(0, abs=1e-6)
    assert flicker(jumps) == pytest.approx(0.2, abs=1e-6)
    assert flicker_rise(jumps, jumps) == 0 and flicker_rise(jumps * 0 + 0.5, jumps) == pytest.approx(0.2, abs=1e-6)
    with pytest.raises(InvalidOptionError, match="3 frames"):
        flicker(jumps[:2])


def test_motion_psnr_does_not_see_what_stands_still() -> None:
    video = pictures(2, 6, 3, 8, 8) / 2
    still, jumping = torch.full((2, 6, 3, 8, 8), 0.1), torch.tensor([0.1, -0.1] * 3).view(1, 6, 1, 1, 1)
    assert motion_psnr(video, video + still) > 120  # rounding
    assert motion_psnr(video + 0.2, video + 0.2 + jumping) == pytest.approx(-20 * math.log10(0.2), abs=1e-3)
    assert motion_psnr(video, video) == math.inf
    scores = compare(video, video + still, ("psnr", "motion_psnr", "flicker_rise"))
    assert scores["psnr"] == pytest.approx(20, abs=1e-3) and abs(scores["flicker_rise"]) < 1e-6


def test_colour_shift_knows_white_red_and_a_tint() -> None:
    """CIE L*a*b* of sRGB white is (100, 0, 0), of red (53.2, 80.1, 67.2)."""
    white, black = torch.ones(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)
    red = black.clone()
    red[:, 0] = 1
    assert colour_shift(black, white) == pytest.approx(100, abs=0.05)
    assert colour_shift(black, red) == pytest.approx(math.hypot(53.24, 80.09, 67.2), abs=0.3)
    ours = pictures(2, 3, 64, 64) * 0.5 + 0.2
    tinted, grainy = ours.clone(), ours + 0.02 * torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    tinted[:, 2] -= 0.02
    assert colour_shift(ours, tinted) > 10 * colour_shift(ours, grainy) and colour_shift(ours, ours) == 0
    assert colour_shift(ours[:, :1], ours[:, :1] + 0.1) > 1  # grey


def test_faults_are_named_and_healthy_pictures_have_none() -> None:
    good, broken = pictures(3, 8, 8), pictures(3, 8, 8)
    broken[1, 2, 3] = math.inf
    black, tint = torch.full((3, 8, 8), 0.01), torch.tensor([0.9, 0.2, 0.1])[:, None, None].expand(3, 8, 8)
    assert faults(torch.stack((good, broken, black, tint))) == [None, "nan", "black", "flat"]
    assert faults(torch.stack((torch.stack((good, good)), torch.stack((good, black))))) == [None, "black"]


def test_difference_pictures_show_where_and_how_much() -> None:
    ours = pictures(2, 3, 16, 16)
    theirs = ours.clone()
    theirs[1, :, 4:8, 4:8] = (theirs[1, :, 4:8, 4:8] + 0.03).clamp(max=1)
    shown, gain = difference(ours, theirs)
    assert shown.shape == ours.shape and not shown[0].any() and 0.5 < shown[1, :, 4:8, 4:8].max() <= 1
    assert gain == 32 and torch.allclose(shown / gain, (ours - theirs).abs(), atol=1e-6)
    assert difference(ours, theirs, gain=1.0)[1] == 1 and difference(ours, ours)[1] == 1
    video = np.random.default_rng(0).random((1, 4, 8, 8, 3), dtype=np.float32)
    assert difference(video, video)[0].shape == (1, 4, 3, 8, 8)
