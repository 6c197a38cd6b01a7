"""The noise floor: how far two plain runs are apart that differ in rounding alone. No difference below it can be seen.

Two ways to round otherwise, of which the farther one counts: the same prompt in a batch of two (other shapes of matrix
products), and attention by its plain formula (PyTorch's "math" kernel).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import DiffaccelError
from ..quality.judgement import Judgement, judge, mean_of
from ..quality.measurement import generate

_FAULTS = (DiffaccelError, RuntimeError, TypeError, ValueError)  # of pipelines that take no batch


def floor(
    pipe: Any, prompts: Sequence[str], seeds: Sequence[int], call: Mapping[str, Any], plain: np.ndarray, level: float
) -> dict[str, Judgement | str]:
    """Per way its judgement against the plain pictures [P, ...] of the same prompts, or why it cannot be taken."""
    found: dict[str, Judgement | str] = {}
    for name, way in (("batch of two", _batch_of_two), ("math attention", _math_attention)):
        try:
            made = [way(pipe, text, seed, call) for text, seed in zip(prompts, seeds, strict=True)]
        except _FAULTS as error:
            found[name] = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        else:
            found[name] = judge(plain[: len(made)], np.concatenate(made), level=level)
    return found


def lowest(ways: Mapping[str, Judgement | str]) -> Judgement | None:
    """The way that is farthest from the plain run in PSNR."""
    judged = [way for way in ways.values() if isinstance(way, Judgement)]
    return min(judged, key=lambda way: mean_of(way, "psnr"), default=None)


def _batch_of_two(pipe: Any, text: str, seed: int, call: Mapping[str, Any]) -> np.ndarray:
    return generate(pipe, [text, text], [seed, seed + 1], call)[:1]


def _math_attention(pipe: Any, text: str, seed: int, call: Mapping[str, Any]) -> np.ndarray:
    with sdpa_kernel(SDPBackend.MATH):
        return generate(pipe, [text], [seed], call)
