"""Padding masks are recognised exactly, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import torch

from diffaccel.attention.padding import PaddingReader, valid_prefix

N = 7


def keys(*valid: int) -> torch.Tensor:
    """[B, 1, 1, N] boolean: the first `valid` keys of each sample."""
    return (torch.arange(N) < torch.tensor(valid)[:, None])[:, None, None]


def square(*valid: int) -> torch.Tensor:
    """[B, 1, N, N] boolean: valid queries see valid keys."""
    row = keys(*valid)
    return row & row.transpose(-1, -2)


def additive(mask: torch.Tensor, low: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same mask as numbers that are added to the scores."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, low)


@pytest.mark.parametrize("make", [keys, square])
@pytest.mark.parametrize("valid", [(5,), (7, 3), (4, 4, 1)])
def test_prefixes(make: object, valid: tuple[int, ...]) -> None:
    mask = make(*valid)  # type: ignore[operator]
    assert valid_prefix(mask, N, N) == valid
    assert valid_prefix(additive(mask, float("-inf")), N, N) == valid
    low = torch.finfo(torch.bfloat16).min
    assert valid_prefix(additive(mask, low, torch.bfloat16), N, N) == valid


def test_what_is_no_padding() -> None:
    hole = keys(5)
    hole[..., 2] = False
    late = ~keys(3)
    per_head = keys(5).expand(1, 2, 1, N)
    row = square(5)
    row[0, 0, 1, 3] = False
    bias = additive(keys(5), -1.0)
    for mask in (hole, late, per_head, row, bias, keys(5)[0, 0, 0], additive(keys(5), -1e4)):
        assert valid_prefix(mask, N, N) is None
    assert valid_prefix(square(5)[:, :, :6], 6, N) is None
    assert valid_prefix(keys(5), N, 9) is None


def test_one_mask_is_read_once() -> None:
    reader = PaddingReader()
    mask = keys(5)
    assert reader.read(mask, 3, N, N) == (5, 5, 5)
    mask[:] = True  # had it been read again, it would say 7
    assert reader.read(mask, 3, N, N) == (5, 5, 5)
    reader.forget()
    assert reader.read(mask, 1, N, N) == (7,) and reader.read(None, 2, N, N) == (N, N)
