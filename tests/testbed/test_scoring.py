"""The scorer: right on the world's own pictures, near chance on other prompts, not fooled by blur."""

import numpy as np
import pytest
import torch
from PIL import Image

from diffaccel.testbed import prompts, score
from diffaccel.testbed.scoring_image import read
from diffaccel.testbed.world import ATTRIBUTES, parse, render

SIZES = [(64, 64), (96, 96), (128, 128), (96, 64), (64, 96)]


def drawn(count, height, width, first_seed=0):
    wanted = prompts(n=count)
    return np.stack([render(parse(p), height, width, first_seed + i) for i, p in enumerate(wanted)]), wanted


def blurred(images):
    """A 3-tap binomial blur down and across, edges repeated."""
    for axis in (1, 2):
        padded = np.pad(images, [(0, 0)] + [(1, 1) if a == axis else (0, 0) for a in (1, 2)] + [(0, 0)], mode="edge")
        count = images.shape[axis]
        taps = [np.take(padded, np.arange(count) + shift, axis=axis) for shift in range(3)]
        images = (taps[0] + 2 * taps[1] + taps[2]) / 4
    return images


@pytest.mark.parametrize("height, width", SIZES)
def test_the_worlds_own_pictures_score_full(height, width):
    result = score(*drawn(96, height, width, first_seed=100))
    assert set(result) == {"score", *ATTRIBUTES}
    assert all(share >= 0.99 for share in result.values()), result


@pytest.mark.parametrize("height, width", SIZES[:1] + SIZES[3:4])
def test_blur_and_noise_do_not_fool_it(height, width):
    images, wanted = drawn(96, height, width)
    noisy = blurred(images) + np.random.default_rng(0).normal(0, 0.03, images.shape)
    assert score(noisy.clip(0, 1), wanted)["score"] >= 0.98


def test_other_prompts_score_near_chance():
    images, wanted = drawn(128, 64, 64)
    result = score(images, wanted[1:] + wanted[:1])
    chance = {"shape": 1 / 6, "colour": 1 / 8, "size": 1 / 3, "place": 1 / 9, "ground": 1 / 6}
    assert all(abs(result[name] - share) < 0.15 for name, share in chance.items()), result
    assert result["score"] < 0.3


def test_a_picture_of_nothing_shows_only_its_ground():
    images, wanted = drawn(1, 64, 64)
    empty = np.broadcast_to(images[:, :1, :1], images.shape)
    result = score(empty, wanted)
    assert result["ground"] == 1.0 and result["score"] == pytest.approx(0.2)


@pytest.mark.parametrize("fill", ["noise", "zeros"])
def test_rubbish_is_scored_without_an_error(fill):
    image = np.random.default_rng(0).random((64, 64, 3)) if fill == "noise" else np.zeros((64, 64, 3))
    assert 0.0 <= score(image[None], prompts(n=1))["score"] <= 0.6
    read(image.astype(np.float32))


def test_every_form_of_images_gives_the_same_result():
    images, wanted = drawn(8, 64, 64)
    bytes_ = (images * 255).round().astype(np.uint8)
    forms = [
        images,
        bytes_,
        [Image.fromarray(image) for image in bytes_],
        torch.from_numpy(images).permute(0, 3, 1, 2),
        torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.bfloat16),
        list(torch.from_numpy(images).permute(0, 3, 1, 2)),
    ]
    results = [score(form, wanted) for form in forms]
    assert all(result == results[0] for result in results)
    assert score(Image.fromarray(bytes_[0]), wanted[0])["score"] == 1.0


def test_unlike_lengths_and_bad_inputs_are_refused():
    images, wanted = drawn(2, 64, 64)
    with pytest.raises(ValueError, match="2 images for 1 prompts"):
        score(images, wanted[:1])
    with pytest.raises(ValueError, match="cannot read"):
        score(images, ["a cat", wanted[0]])
    with pytest.raises(ValueError, match="B, H, W, 3"):
        score(images[0], wanted[:1])
    with pytest.raises(ValueError, match="B, 3, H, W"):
        score(torch.from_numpy(images), wanted)
    with pytest.raises(ValueError, match="empty"):
        score([], [])
