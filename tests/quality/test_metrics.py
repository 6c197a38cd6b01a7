"""Closed forms, agreement between input forms, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from diffaccel.errors import DiffaccelError, InvalidOptionError
from diffaccel.quality import max_error, mse, psnr, ssim


def pictures(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def eight_bit() -> np.ndarray:
    """Two pictures as uint8 [B, H, W, C]."""
    return np.random.default_rng(0).integers(0, 256, (2, 24, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize("shift", [0.5, 0.1, 0.001])
def test_constant_shift_has_a_known_error(shift):
    zero = torch.zeros(2, 3, 16, 16, dtype=torch.float64)
    moved = zero + shift
    assert mse(zero, moved) == pytest.approx(shift**2)
    assert max_error(zero, moved) == pytest.approx(shift)
    assert psnr(zero, moved) == pytest.approx(-20 * math.log10(shift))


def test_one_wrong_value_is_found():
    ours = pictures(2, 3, 16, 16)
    theirs = ours.clone()
    theirs[1, 2, 3, 4] -= 0.25
    assert max_error(ours, theirs) == pytest.approx(0.25)
    assert mse(ours, theirs) == pytest.approx(0.25**2 / ours.numel())
    assert ssim(ours, theirs) < 1


def test_identical_pictures():
    ours = pictures(2, 3, 16, 16)
    assert mse(ours, ours.clone()) == 0
    assert max_error(ours, ours.clone()) == 0
    assert psnr(ours, ours.clone()) == math.inf
    assert ssim(ours, ours.clone()) == pytest.approx(1)


def test_unrelated_pictures_score_badly():
    ours, theirs = pictures(2, 3, 32, 32), pictures(2, 3, 32, 32, seed=1)
    assert psnr(ours, theirs) == pytest.approx(10 * math.log10(6), abs=0.2)  # E (u - v)^2 = 1/6
    assert abs(ssim(ours, theirs)) < 0.1


def test_psnr_is_the_mean_over_pictures_and_skips_identical_ones():
    zero = torch.zeros(3, 3, 16, 16, dtype=torch.float64)
    moved = zero.clone()
    moved[0] += 0.1  # 20 dB
    moved[1] += 0.01  # 40 dB
    assert psnr(zero, moved) == pytest.approx(30)
    assert mse(zero, moved) == pytest.approx((0.1**2 + 0.01**2) / 3)


def test_nan_is_never_good():
    ours = pictures(1, 3, 16, 16)
    theirs = ours.clone()
    theirs[0, 0, 0, 0] = math.nan
    for metric in (mse, max_error, psnr, ssim):
        assert math.isnan(metric(ours, theirs))


def test_torchmetrics_agrees():
    ours = pictures(3, 3, 24, 40)
    theirs = (ours + 0.05 * torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    expected = peak_signal_noise_ratio(theirs, ours, data_range=1.0, dim=(1, 2, 3))
    assert psnr(ours, theirs) == pytest.approx(float(expected), abs=1e-4)
    expected = structural_similarity_index_measure(theirs, ours, data_range=1.0)
    assert ssim(ours, theirs) == pytest.approx(float(expected), abs=1e-6)


def test_input_forms_agree(eight_bit):
    other = np.clip(eight_bit.astype(int) + 7, 0, 255).astype(np.uint8)
    unit = torch.from_numpy(eight_bit).permute(0, 3, 1, 2) / 255
    forms = [
        unit,
        list(unit),
        torch.from_numpy(eight_bit).permute(0, 3, 1, 2),
        eight_bit,
        list(eight_bit),
        eight_bit / 255,
        unit.numpy(),
        [Image.fromarray(picture) for picture in eight_bit],
    ]
    against = [Image.fromarray(picture) for picture in other]
    for metric in (mse, max_error, psnr, ssim):
        values = [metric(form, against) for form in forms]
        assert values == pytest.approx([values[0]] * len(forms), rel=1e-5)
        assert metric(forms[0], forms[-1]) != pytest.approx(values[0])  # the comparison is not blind


def test_a_single_picture_of_each_form(eight_bit):
    array = eight_bit[0]
    tensor = torch.from_numpy(array).permute(2, 0, 1) / 255
    assert mse(tensor, Image.fromarray(array)) == pytest.approx(0, abs=1e-12)
    assert mse(tensor[None], array) == pytest.approx(0, abs=1e-12)


def test_a_picture_three_pixels_high_is_still_channels_last(eight_bit):
    array = eight_bit[0, :3]
    assert mse(Image.fromarray(array), torch.from_numpy(array).permute(2, 0, 1) / 255) < 1e-12


def test_video_frames_count_as_pictures():
    ours, theirs = pictures(2, 5, 3, 16, 16), pictures(2, 5, 3, 16, 16, seed=1)
    for metric in (mse, max_error, psnr, ssim):
        assert metric(ours, theirs) == pytest.approx(metric(ours.flatten(0, 1), theirs.flatten(0, 1)))
        assert metric(ours.movedim(2, -1).numpy(), theirs) == pytest.approx(metric(ours, theirs))
    frames = [[Image.new("RGB", (16, 16), (255, 0, 0))] * 4] * 2  # two videos of four frames
    assert mse(frames, torch.zeros(2, 4, 3, 16, 16)) == pytest.approx(1 / 3)


def test_videos_with_channels_last_and_one_video_without_batch_axis():
    ours, theirs = pictures(1, 5, 3, 16, 20), pictures(1, 5, 3, 16, 20, seed=1)
    last = ours.movedim(2, -1)  # [1, F, H, W, 3]
    for metric in (mse, max_error, psnr, ssim):
        expected = metric(ours, theirs)
        for form in (last, last[0], ours[0], last[0].numpy(), list(last[0])):
            assert metric(form, theirs) == metric(theirs[0], form) == pytest.approx(expected, rel=1e-6)
        assert metric(last[0].flip(0), theirs) != pytest.approx(expected, rel=1e-6)  # the order of frames counts
    two = pictures(2, 5, 3, 16, 20)
    for one_axis_less in (two[0], two.flatten(0, 1)):  # which video is meant would be a guess
        with pytest.raises(InvalidOptionError, match=r"\[2, 5, 3, 16, 20\]"):
            mse(two, one_axis_less)


def test_half_precision_and_gradients_are_accepted():
    ours = pictures(1, 3, 16, 16).requires_grad_()
    assert psnr(ours, ours.to(torch.bfloat16)) > 40


def test_a_large_difference_within_uint8_does_not_wrap():
    black, white = np.zeros((1, 16, 16, 3), np.uint8), np.full((1, 16, 16, 3), 255, np.uint8)
    assert mse(black, white) == 1
    assert psnr(black, white) == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 8), ["[1, 3, 16, 16]", "[1, 3, 16, 8]"]),
        (torch.zeros(2, 3, 16, 16), torch.zeros(1, 3, 16, 16), ["[2, 3, 16, 16]", "[1, 3, 16, 16]"]),
        (Image.new("RGB", (16, 8)), Image.new("RGB", (8, 16)), ["[1, 3, 8, 16]", "[1, 3, 16, 8]"]),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], torch.zeros(2, 3, 8, 8), ["[3, 8, 8]", "[3, 9, 9]"]),
    ],
)
def test_shapes_that_differ_are_both_named(ours, theirs, said):
    with pytest.raises(InvalidOptionError) as error:
        mse(ours, theirs)
    for shape in said:
        assert shape in str(error.value)


NOT_PICTURES = {
    "path of nothing": "a path.png",
    "bytes": b"a path.png",
    "deep picture": Image.new("I;16", (16, 16)),
    "none": None,
    "number": 3.0,
    "empty list": [],
    "dict": {},
    "vector": torch.zeros(5),
    "empty batch": torch.zeros(0, 3, 8, 8),
    "text array": np.array(["a"]),
    "complex": torch.zeros(3, 8, 8) * 1j,
}


@pytest.mark.parametrize("thing", NOT_PICTURES.values(), ids=NOT_PICTURES.keys())
def test_what_is_not_a_picture_is_refused(thing):
    with pytest.raises(InvalidOptionError, match="compare"):
        psnr(thing, thing)
    with pytest.raises(ValueError):
        psnr(thing, thing)
    with pytest.raises(DiffaccelError):
        psnr(thing, thing)


def test_ssim_says_that_a_picture_is_too_small():
    with pytest.raises(InvalidOptionError, match="8x6"):
        ssim(torch.zeros(1, 3, 6, 8), torch.zeros(1, 3, 6, 8))
