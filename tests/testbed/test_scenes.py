"""The scenes world: pictures by seed at any size, captions that read back, a clean split, and its scorer."""

import numpy as np
import pytest
from PIL import Image

from diffaccel.testbed import outlines, prompts, scenes, score, scoring_scenes
from diffaccel.testbed.scenes import Picture, Thing, parse, render, sample
from diffaccel.testbed.tokenizers import SCENES_LENGTH, scenes_tokenizer

PICTURE = Picture(
    (Thing("ring", "red", "striped", "top left"), Thing("k", "yellow", "solid", "bottom right")), "navy", "dotted"
)


def drawn(count, height, width, first_seed=0):
    wanted = prompts(n=count, kind="scenes")
    return np.stack([render(parse(p), height, width, first_seed + i) for i, p in enumerate(wanted)]), wanted


def test_a_picture_is_fixed_by_its_seed_at_any_size():
    for height, width in [(64, 64), (128, 128), (96, 64)]:
        one, again, other = (render(PICTURE, height, width, seed) for seed in (3, 3, 4))
        assert one.shape == (height, width, 3) and one.dtype == np.float32
        assert one.min() >= 0.0 and one.max() <= 1.0
        assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_the_double_size_shows_the_same_picture():
    small, large = (render(PICTURE, side, side, 5) for side in (64, 128))
    halved = large.reshape(64, 2, 64, 2, 3).mean(axis=(1, 3))
    other = render(PICTURE, 64, 64, 6)
    assert np.abs(halved - small).mean() < 0.02 < 0.04 < np.abs(other - small).mean()


def test_captions_read_back_in_every_wording():
    assert PICTURE.caption() == "striped red ring top left, solid yellow k bottom right, dotted navy background"
    for seed in range(200):
        picture = sample("train", seed)
        assert all(parse(picture.caption(template)) == picture for template in range(scenes.TEMPLATE_COUNT))


@pytest.mark.parametrize(
    "caption",
    [
        "striped red ring top left",  # no background
        "plain navy background",  # nothing on it
        "striped red ring top left, solid red k top left, plain navy background",  # twice the same quarter
        "striped red ring at the top left, plain navy background",
        "a small red ring at the left on a navy background",  # the other world's
    ],
)
def test_other_captions_are_refused_in_one_short_sentence(caption):
    with pytest.raises(ValueError, match="striped red ring top left, outlined") as caught:
        parse(caption)
    assert len(str(caught.value)) <= 300


def test_the_split_is_clean_and_prompts_are_prefix_stable():
    test, train = prompts(n=100, kind="scenes"), prompts("train", n=100, kind="scenes")
    assert all(scenes.is_test(parse(prompt)) for prompt in test)
    assert not any(scenes.is_test(parse(prompt)) for prompt in train)
    assert prompts(n=8, kind="scenes") == test[:8] != prompts(n=8, seed=1, kind="scenes")
    share = np.mean([scenes.is_test(sample("train" if i % 8 else "test", i)) for i in range(80)])
    assert share == 0.125
    with pytest.raises(ValueError, match="split"):
        sample("validation", 0)


def test_every_word_is_one_token_and_every_caption_fits():
    tokenizer = scenes_tokenizer()
    for seed in range(100):
        caption = sample("train", seed).caption()
        ids = tokenizer(caption).input_ids
        assert len(ids) == len(caption.replace(",", " ,").split()) + 2 <= SCENES_LENGTH
    assert tokenizer.eos_token_id == len(tokenizer) - 1  # the pooled embedding is read at the highest id


def test_outlines_are_inside_at_their_ink_and_outside_afar():
    far = np.array(2.0)
    for kind in outlines.KINDS:
        assert outlines.distance(kind, far, far) > 0.5
    for letter, strokes in outlines.LETTERS.items():
        for y0, x0, y1, x1 in strokes:
            assert outlines.distance(letter, np.array((y0 + y1) / 2), np.array((x0 + x1) / 2)) < -0.2
    assert (
        outlines.distance("star", np.array(-1.0), np.array(0.0))
        < 0
        < outlines.distance("star", np.array(1.0), np.array(0.0))
    )


@pytest.mark.parametrize("size, count", [((64, 64), 12), ((128, 128), 4), ((96, 64), 4)])
def test_the_worlds_own_pictures_score_full(size, count):
    result = score(*drawn(count, *size, first_seed=100))
    assert list(result) == ["score", *scenes.ATTRIBUTES]
    assert all(share >= 0.95 for share in result.values()), result


def test_every_form_of_images_scores_the_same_and_noise_does_not_fool_it():
    images, wanted = drawn(4, 64, 64)
    pil = [Image.fromarray((image * 255).round().astype(np.uint8)) for image in images]
    noisy = images + np.random.default_rng(0).normal(0, 0.03, images.shape)
    assert score(images, wanted) == score(pil, wanted)
    assert score(noisy.clip(0, 1), wanted)["score"] >= 0.95


def test_other_pictures_and_empty_grounds_score_low():
    images, wanted = drawn(12, 64, 64)
    assert score(np.roll(images, 1, axis=0), wanted)["score"] < 0.45
    grey = score(np.full_like(images, 0.43), wanted)
    assert grey["kind"] == grey["colour"] == grey["quarters"] == 0.0
    with pytest.raises(ValueError, match="as many"):
        score(images[:2], wanted)


def test_what_a_thing_is_counts_by_thing():
    other = Picture((PICTURE.things[0], Thing("k", "green", "solid", "bottom right")), "navy", "plain")
    result = scoring_scenes.agreement(other, PICTURE)
    assert result == {"quarters": 1.0, "kind": 1.0, "colour": 0.5, "filling": 1.0, "ground": 1.0, "pattern": 0.0}
    fewer = Picture(PICTURE.things[:1], "navy", "dotted")
    assert scoring_scenes.agreement(fewer, PICTURE)["quarters"] == 0.0
    assert scoring_scenes.agreement(fewer, PICTURE)["kind"] == 0.5
