"""Give a pipeline of the testbed another shift of its noise levels, as the benchmarks compare them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from .bundle import Pipeline

    P = TypeVar("P", bound=Pipeline)

DYNAMIC = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 64, "max_image_seq_len": 256}
_VIDEO_TOKENS = 192  # of the usual call: 3 latent frames of 8x8


def with_shift(pipe: P, shift: float | Literal["dynamic"]) -> P:
    """`pipe` itself with a new scheduler of its class: a fixed shift (1 is none), or "dynamic" by picture size.

    Dynamic shifting has exponent 0.5 at 64 tokens and 1.15 at 256, in a straight line. WanPipeline tells its scheduler
    no exponent, so there "dynamic" is the fixed shift that its usual size has. Raises InvalidOptionError for a shift
    that is neither a positive number nor "dynamic".
    """
    if shift != "dynamic" and not (isinstance(shift, int | float) and 0.0 < shift < math.inf):
        from ..errors import InvalidOptionError

        raise InvalidOptionError(f"shift must be a positive number or 'dynamic', not {shift!r}")
    dynamic = shift == "dynamic" and type(pipe).__name__ != "WanPipeline"
    if shift == "dynamic" and not dynamic:
        slope = (DYNAMIC["max_shift"] - DYNAMIC["base_shift"]) / (256 - 64)
        shift = math.exp(DYNAMIC["base_shift"] + slope * (_VIDEO_TOKENS - 64))
    options = {"use_dynamic_shifting": True, **DYNAMIC} if dynamic else {"use_dynamic_shifting": False, "shift": shift}
    scheduler = pipe.scheduler
    pipe.scheduler = type(scheduler).from_config(scheduler.config, **options)
    return pipe
