"""The world: pictures by seed at any size, captions that say what is drawn, a clean split."""

import numpy as np
import pytest

from diffaccel.testbed import prompts, world
from diffaccel.testbed.world import Scene, parse, render

SCENE = Scene("ring", "red", "large", "left", "navy")


@pytest.mark.parametrize("height, width", [(64, 64), (96, 96), (128, 128), (96, 64), (40, 72)])
def test_a_picture_is_fixed_by_its_seed_at_any_size(height, width):
    one, again, other = (render(SCENE, height, width, seed) for seed in (3, 3, 4))
    assert one.shape == (height, width, 3) and one.dtype == np.float32
    assert one.min() >= 0.0 and one.max() <= 1.0
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_the_same_seed_shows_the_same_scene_at_twice_the_size():
    small, large = render(SCENE, 64, 64, 5), render(SCENE, 128, 128, 5)
    shrunk = large.reshape(64, 2, 64, 2, 3).mean(axis=(1, 3))
    assert np.abs(small - shrunk).mean() < 0.01


def test_the_caption_of_the_contract():
    assert SCENE.caption() == "a large red ring at the left on a navy background"


def test_every_caption_reads_back_in_every_wording():
    for split in ("train", "test"):
        for scene in world.combinations(split):
            for template in range(world.TEMPLATE_COUNT):
                assert parse(scene.caption(template)) == scene


@pytest.mark.parametrize(
    "caption", ["", "a red ring at the left on a navy background", "a large red ring on a navy background", "a cat"]
)
def test_a_caption_of_another_world_is_refused(caption):
    with pytest.raises(ValueError, match="cannot read"):
        parse(caption)


def test_the_split_is_disjoint_complete_and_about_one_in_eight():
    train, test = set(world.combinations("train")), set(world.combinations("test"))
    assert not train & test
    everything = len(world.SHAPES) * len(world.COLOURS) * len(world.SIZES) * len(world.PLACES) * len(world.GROUNDS)
    assert len(train | test) == everything
    assert 0.10 < len(test) / everything < 0.15
    assert all(not world.is_test(scene) for scene in train)


def test_prompts_are_deterministic_prefix_stable_and_held_out():
    assert len(prompts()) == 128
    assert prompts(n=8) == prompts(split="test", n=128)[:8]
    assert prompts(n=8, seed=1) != prompts(n=8)
    assert all(world.is_test(parse(prompt)) for prompt in prompts(n=128))
    assert not any(world.is_test(parse(prompt)) for prompt in prompts(split="train", n=128))
    assert len(set(prompts(n=128))) == 128
    assert prompts(n=0) == []


@pytest.mark.parametrize("arguments", [{"split": "validation"}, {"n": -1}])
def test_bad_prompt_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        prompts(**arguments)
