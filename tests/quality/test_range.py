"""Pictures in floating point are in 0..1; others are refused, as their figures would be wrong without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffaccel import InvalidOptionError, quality

UNIT = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("side", ["reference", "candidate"])
@pytest.mark.parametrize(
    ("kind", "make", "hint"),
    [
        ("-1..1", lambda x: x * 2 - 1, "x / 2 + 0.5"),
        ("0..255", lambda x: x * 255, "255"),
        ("an infinity", lambda x: x.where(x > x.min(), torch.inf), "0..1"),
        ("bfloat16", lambda x: (x * 2 - 1).bfloat16(), "x / 2 + 0.5"),
        ("numpy", lambda x: (x * 255).numpy(), "255"),
        ("channels last", lambda x: (x * 255).movedim(1, -1).numpy().astype(np.float64), "255"),
        ("a list", lambda x: list(x * 2 - 1), "x / 2 + 0.5"),
        ("a video", lambda x: (x * 255)[None], "255"),
    ],
)
def test_refused_with_the_range_and_the_way(side: str, kind: str, make: Any, hint: str) -> None:
    good = UNIT[None] if kind == "a video" else UNIT
    both = (make(UNIT), good) if side == "reference" else (good, make(UNIT))
    for call in (quality.compare, quality.psnr):
        with pytest.raises(InvalidOptionError) as error:
            call(*both)
        said = str(error.value)
        assert side in said and "0..1" in said and hint in said and len(said) <= 300, said


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: x.bfloat16(), lambda x: x + 2e-3, lambda x: (x * 255).byte(), lambda x: x * 0]
)
def test_taken(make: Any) -> None:
    """The negative control: 8-bit values, and a rounding's worth outside."""
    assert quality.compare(UNIT, make(UNIT))["psnr"] > 3
