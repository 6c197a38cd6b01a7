"""Whose call of an autoencoder is this? Several pipelines may share one, and users call it by hand."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.protocols import Pipeline


def called_by_another(pipe: Pipeline) -> bool:
    """Does the nearest pipeline on the call stack differ from `pipe`? False where there is none: a call by hand."""
    from diffusers import DiffusionPipeline, ModularPipeline

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            caller = frame.f_locals.get("self")
            if isinstance(caller, (DiffusionPipeline, ModularPipeline)):
                return caller is not pipe
        frame = frame.f_back
    return False
