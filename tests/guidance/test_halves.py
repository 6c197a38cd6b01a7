"""Cutting the arguments of a batched call: by name, never by size alone, and the originals stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from diffaccel.guidance.halves import Unclear, half_of_inputs, half_of_output, join, likeness, repeats

NAMES = ("hidden_states", "timestep", "encoder_hidden_states")


def rows(count: int, *more: int) -> torch.Tensor:
    """Rows that tell their number."""
    return torch.arange(count).reshape(count, *[1] * len(more)).expand(count, *more).clone()


@pytest.mark.parametrize("second", [False, True])
def test_everything_that_carries_the_batch_is_cut(second: bool) -> None:
    wanted = [2, 3] if second else [0, 1]
    args = (rows(4, 3), torch.tensor(7))
    kwargs: dict[str, Any] = {
        "encoder_hidden_states": rows(4, 5, 2),
        "added_cond_kwargs": {"text_embeds": rows(4, 2), "time_ids": rows(4, 6), "image_embeds": [rows(4, 1, 2)]},
        "down_block_additional_residuals": (rows(4, 2), rows(4, 3)),
        "encoder_attention_mask": None,
        "cross_attention_kwargs": {"scale": 0.5},
        "return_dict": False,
        "num_frames": 4,
    }
    (main, timestep), found = half_of_inputs(NAMES, args, kwargs, second)
    tensors = [main, found["encoder_hidden_states"], *found["added_cond_kwargs"]["image_embeds"]]
    tensors += [found["added_cond_kwargs"][key] for key in ("text_embeds", "time_ids")]
    tensors += found["down_block_additional_residuals"]
    assert all(t.flatten(1)[:, 0].tolist() == wanted for t in tensors)
    assert timestep is args[1] and found["num_frames"] == 4 and found["cross_attention_kwargs"] == {"scale": 0.5}
    assert type(found["down_block_additional_residuals"]) is tuple and list(found) == list(kwargs)
    assert len(kwargs["added_cond_kwargs"]["text_embeds"]) == 4, "the caller's own dict is as it was"


def test_by_keyword_only() -> None:
    args, kwargs = half_of_inputs(NAMES, (), {"hidden_states": rows(2, 3), "timestep": rows(2)}, True)
    assert args == () and kwargs["hidden_states"].tolist() == [[1, 1, 1]] and kwargs["timestep"].tolist() == [1]


def test_what_has_one_row_is_for_all() -> None:
    _, kwargs = half_of_inputs(NAMES, (rows(2, 3),), {"timestep": rows(1), "mask": rows(1, 5)}, True)
    assert len(kwargs["timestep"]) == len(kwargs["mask"]) == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"image_rotary_emb": (rows(8, 4), rows(8, 4))}, "not known whether image_rotary_emb, of 8 rows"),
        ({"attention_kwargs": {"bias": rows(4, 4)}}, "not known whether bias"),
        ({"timestep": rows(3)}, "timestep has 3 rows, and the doubled batch has 4"),
    ],
)
def test_what_cannot_be_told_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(Unclear, match=message):
        half_of_inputs(NAMES, (rows(4, 3),), kwargs, True)


def test_a_card_can_tell() -> None:
    table = {"image_rotary_emb": (rows(8, 4), rows(4, 4)), "attention_kwargs": {"bias": rows(4, 4)}}
    _, kwargs = half_of_inputs(NAMES, (rows(4, 3),), table, True, batchless=("image_rotary_emb", "bias"))
    assert kwargs["image_rotary_emb"][1] is table["image_rotary_emb"][1]
    assert kwargs["attention_kwargs"]["bias"] is table["attention_kwargs"]["bias"]
    odd = {"anything": rows(7, 2)}  # cannot carry a batch of four
    assert half_of_inputs(NAMES, (rows(4, 3),), odd, True)[1]["anything"] is odd["anything"]


def test_lists_of_samples() -> None:
    """Z-Image: one element for each sample, and lists inside of lists stay whole."""
    samples = [rows(1, 2) + i for i in range(4)]
    (x, t, texts), rest = half_of_inputs(("x", "t", "cap_feats"), (samples, rows(4), list("abcd")), {}, False)
    assert x == samples[:2] and t.tolist() == [0, 1] and texts == ["a", "b"] and rest == {}
    assert len(samples) == 4


def test_outputs() -> None:
    whole = (rows(4, 2), [rows(1), rows(2), rows(3), rows(4)], None)
    first, second = (half_of_output(whole, 4, part) for part in (False, True))
    assert first[0].tolist() == [[0, 0], [1, 1]] and [len(t) for t in second[1]] == [3, 4]
    again = join(first, second)
    assert torch.equal(again[0], whole[0]) and again[1] == whole[1] and again[2] is None
    model = Transformer2DModelOutput(sample=rows(4, 2))
    both = join(half_of_output(model, 4, False), half_of_output(model, 4, True))
    assert type(both) is Transformer2DModelOutput and torch.equal(both.sample, model.sample)
    with pytest.raises(Unclear, match="an output has 3 rows"):
        half_of_output((rows(3, 2),), 4, True)


def test_repeats_and_likeness() -> None:
    x = torch.randn(2, 3)
    assert repeats(torch.cat([x, x])) and not repeats(torch.cat([x, x + 1])) and not repeats(torch.cat([x, x, x]))
    assert repeats([x, x + 1, x.clone(), x + 1]) and not repeats([x, x, x, x + 1])
    assert likeness(x) == likeness(x + 1) != likeness(x.double()) and likeness([x]) == (likeness(x),)
