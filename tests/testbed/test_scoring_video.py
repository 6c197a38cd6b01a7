"""The scorer on clips: right on the world's own, near chance on other prompts, in every form."""

import numpy as np
import pytest
import torch
from PIL import Image

from diffaccel.testbed import motion, prompts, score
from diffaccel.testbed.motion import ATTRIBUTES


def drawn(count, frames=9, height=48, width=48, first_seed=0):
    wanted = prompts(n=count, kind="video")
    clips = [motion.render(motion.parse(p), frames, height, width, first_seed + i) for i, p in enumerate(wanted)]
    return np.stack(clips), wanted


@pytest.mark.parametrize("shape", [(9, 48, 48), (9, 64, 64), (17, 48, 48), (5, 48, 64)])
def test_the_worlds_own_clips_score_full(shape):
    result = score(*drawn(32, *shape, first_seed=100))
    assert list(result) == ["score", *ATTRIBUTES]
    assert all(share >= 0.96 for share in result.values()), result


def test_noise_does_not_fool_it():
    clips, wanted = drawn(32)
    noisy = clips + np.random.default_rng(0).normal(0, 0.03, clips.shape)
    assert score(noisy.clip(0, 1), wanted)["score"] >= 0.95


def test_other_prompts_score_near_chance_and_a_reversed_clip_moves_the_other_way():
    clips, wanted = drawn(64)
    assert score(clips, wanted[1:] + wanted[:1])["score"] < 0.35
    still = np.mean(["still" in prompt for prompt in wanted])
    backwards = score(clips[:, ::-1], wanted)
    assert backwards["motion"] == pytest.approx(still)
    assert backwards["place"] >= 0.96 and backwards["shape"] >= 0.96


def test_a_frozen_clip_shows_no_motion():
    clips, wanted = drawn(32)
    frozen = np.repeat(clips[:, 4:5], 9, axis=1)
    assert score(frozen, wanted)["motion"] == pytest.approx(np.mean(["still" in prompt for prompt in wanted]))


def test_a_clip_of_nothing_shows_only_its_ground():
    clips, wanted = drawn(1)
    empty = np.broadcast_to(clips[:, :, :1, :1], clips.shape)
    assert score(empty, wanted)["score"] == pytest.approx(1 / 6)


def test_every_form_of_videos_gives_the_same_result():
    clips, wanted = drawn(3)
    bytes_ = (clips * 255).round().astype(np.uint8)
    tensor = torch.from_numpy(clips).permute(0, 1, 4, 2, 3)
    forms = [
        clips,
        bytes_,
        tensor,
        tensor.to(torch.bfloat16),
        list(clips),
        [list(clip) for clip in clips],
        [[Image.fromarray(frame) for frame in clip] for clip in bytes_],
    ]
    results = [score(form, wanted) for form in forms]
    assert all(result == results[0] for result in results)


def test_prompts_of_the_other_kind_and_bad_forms_are_refused():
    clips, wanted = drawn(2)
    with pytest.raises(ValueError, match="cannot read one motion"):
        score(clips, prompts(n=2))
    with pytest.raises(ValueError, match="states a motion"):
        score(clips[:, 0], wanted)
    with pytest.raises(ValueError, match="2 videos for 1 prompts"):
        score(clips, wanted[:1])
    with pytest.raises(ValueError, match="B, F, H, W, 3"):
        score(clips.transpose(0, 1, 4, 2, 3), wanted)
    with pytest.raises(ValueError, match="B, F, 3, H, W"):
        score(torch.from_numpy(clips), wanted)
