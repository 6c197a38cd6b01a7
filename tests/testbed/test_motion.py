"""The video world: clips by seed at any size and length, captions that state the motion, a clean split."""

import numpy as np
import pytest

from diffaccel.testbed import motion, prompts, world
from diffaccel.testbed.motion import MOTIONS, Clip, parse, render
from diffaccel.testbed.world import Scene

SCENE = Scene("ring", "red", "small", "centre", "navy")


def centre(picture):
    """(down, across) of the reddish part, fractions."""
    weight = np.clip(picture[..., 0] - 0.3, 0.0, None)
    height, width = weight.shape
    rows, columns = (np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width
    return np.array([(weight.sum(1) * rows).sum(), (weight.sum(0) * columns).sum()]) / weight.sum()


@pytest.mark.parametrize("frames, height, width", [(9, 48, 48), (17, 64, 64), (5, 48, 64), (1, 48, 48)])
def test_a_clip_is_fixed_by_its_seed_at_any_size_and_length(frames, height, width):
    clip = Clip(SCENE, "right")
    one, again, other = (render(clip, frames, height, width, seed) for seed in (3, 3, 4))
    assert one.shape == (frames, height, width, 3) and one.dtype == np.float32
    assert one.min() >= 0.0 and one.max() <= 1.0
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_at_half_time_it_is_the_picture_of_its_scene():
    assert np.array_equal(render(Clip(SCENE, "up"), 9, 48, 64, 5)[4], world.render(SCENE, 48, 64, 5))


@pytest.mark.parametrize("frames", [9, 17])
@pytest.mark.parametrize("name", MOTIONS)
def test_it_covers_its_way_in_equal_steps_whatever_its_length(name, frames):
    centres = np.array([centre(picture) for picture in render(Clip(SCENE, name), frames, 64, 64)])
    assert centres[-1] - centres[0] == pytest.approx(MOTIONS[name], abs=0.01)
    assert np.diff(centres, axis=0) == pytest.approx(
        np.tile(np.array(MOTIONS[name]) / (frames - 1), (frames - 1, 1)), abs=0.01
    )


def test_the_captions_of_the_contract():
    scene = Scene("ring", "red", "large", "left", "navy")
    assert Clip(scene, "right").caption() == "a large red ring at the left on a navy background, moving right"
    assert Clip(scene, "still").caption().endswith(", standing still")


def test_every_caption_reads_back_in_every_wording():
    for split in ("train", "test"):
        for clip in motion.combinations(split)[::7]:
            for template in range(motion.TEMPLATE_COUNT):
                assert parse(clip.caption(template)) == clip


def test_a_caption_without_a_motion_is_refused_and_so_is_the_reverse():
    with pytest.raises(ValueError, match="cannot read one motion"):
        parse(SCENE.caption())
    with pytest.raises(ValueError, match="states a motion"):
        world.parse(Clip(SCENE, "left").caption())
    with pytest.raises(ValueError, match="cannot read one motion"):
        parse(SCENE.caption() + ", moving left, moving right")


def test_the_split_is_disjoint_complete_and_about_one_in_eight():
    train, test = set(motion.combinations("train")), set(motion.combinations("test"))
    assert not train & test
    everything = len(list(world.every_scene())) * len(MOTIONS)
    assert len(train | test) == everything
    assert 0.10 < len(test) / everything < 0.15
    with pytest.raises(ValueError, match="split"):
        motion.combinations("validation")


def test_prompts_are_deterministic_prefix_stable_and_held_out():
    assert prompts(n=8, kind="video") == prompts(n=128, kind="video")[:8]
    assert prompts(n=8, seed=1, kind="video") != prompts(n=8, kind="video")
    assert all(motion.is_test(parse(prompt)) for prompt in prompts(kind="video"))
    assert {parse(prompt).motion for prompt in prompts(kind="video")} == set(MOTIONS)
    assert not {*prompts(n=200, kind="video")} & {*prompts("train", n=200, kind="video")}
