"""The prompts of every world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import motion, scenes, world


def prompts(split: str = "test", n: int | None = None, seed: int = 0, kind: str = "image") -> list[str]:
    """`n` canonical captions (128 unless told) of one split, shuffled by `seed`; prefix-stable in `n`.

    `kind` is "image", "video" (its captions state a motion too) or "scenes".
    """
    from .bundle import check

    check(kind)
    count = 128 if n is None else n
    if count < 0:
        raise ValueError(f"n must not be negative, got {n}")
    if kind == "scenes":  # too many to list: scene number i of stream `seed`
        return [scenes.sample(split, (seed, i)).caption() for i in range(count)]
    every: Sequence[Any] = motion.combinations(split) if kind == "video" else world.combinations(split)
    order = np.random.default_rng(seed).permutation(len(every))
    return [every[order[i % len(every)]].caption() for i in range(count)]
