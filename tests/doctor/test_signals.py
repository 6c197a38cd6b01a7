"""The signals by themselves: what they say of pictures made for the purpose."""

from __future__ import annotations

import torch

from diffaccel.doctor import signals
from diffaccel.doctor.reading import Read, cut_prompts


def video(frames: int = 24) -> torch.Tensor:
    """A gradient that moves evenly: [1, F, 3, 16, 16]."""
    x = torch.linspace(0, 1, 16)
    return torch.stack([(x + 0.01 * f).clamp(0, 2).div(2).expand(3, 16, 16) for f in range(frames)])[None]


def noise(scale: float, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)) * scale


def test_a_seam_is_seen_at_its_frame_and_rounding_is_not() -> None:
    whole = video()
    pieces = whole.clone()
    pieces[:, 8:] += 0.05  # from here on another piece
    assert signals.seams(whole, pieces) == [8]
    assert signals.seams(whole, whole + noise(1e-4, whole)) == []
    assert signals.seams(whole, whole) == []
    ramp = torch.linspace(0, 0.05, 24).view(1, 24, 1, 1, 1)
    assert signals.seams(whole, whole + ramp) == []  # blended over all frames


def test_colours_are_moved_or_the_picture_is_another_one() -> None:
    plain = video(1)
    red = plain + torch.tensor([0.05, 0.0, 0.0]).view(1, 1, 3, 1, 1)
    largest, share = signals.colour_shift(plain, red)
    assert abs(largest - 0.05) < 1e-6 and share > 0.99 and signals.is_shifted(plain, red)
    assert not signals.is_shifted(plain, plain + noise(0.2, plain))
    assert not signals.is_shifted(plain, plain + 0.001)  # nobody sees that
    assert signals.colour_shift(plain, plain) == (0.0, 0.0)


def test_flicker_is_none_in_even_motion_of_brightness() -> None:
    ramp = torch.linspace(0, 1, 9).view(1, 9, 1, 1, 1).expand(1, 9, 3, 4, 4)
    assert signals.flicker(ramp) < 1e-6
    blinking = ramp.clone()
    blinking[:, ::2] += 0.1
    assert abs(signals.flicker(blinking) - 0.1) < 1e-5
    assert signals.flicker(ramp[:, :2]) == 0.0


def test_flat_black_and_not_finite() -> None:
    assert signals.is_flat(torch.full((2, 1, 3, 8, 8), 0.3)) and not signals.is_flat(video(1))
    one_of_two = torch.cat((torch.zeros(1, 1, 3, 16, 16), video(1)))
    assert not signals.is_flat(one_of_two)
    assert signals.all_finite(video(1)) and not signals.all_finite(video(1) / 0)
    assert signals.decibels(video(1), video(1)) == float("inf")
    assert abs(signals.decibels(torch.zeros(4), torch.full((4,), 0.1)) - 20) < 1e-4


def test_a_prompt_is_lost_only_where_nobody_reads_it_whole() -> None:
    clip, t5 = Read("tokenizer", "A  red ring", 90, 77), Read("tokenizer_2", "<s> a red ring", 90, 512)
    assert cut_prompts([clip, t5], ["a red ring"]) == ([], [clip])
    assert cut_prompts([clip], ["a red ring"]) == ([clip], [])
    assert cut_prompts([clip], ["a blue one"]) == ([], [])
