"""The scopes that methods with a choice of them take by a word."""

from __future__ import annotations

from ...core.options import GOT, confirm, one_of
from ...errors import InvalidOptionError, unknown
from ..engine import Scope
from .denoiser import Denoiser
from .modules import Modules
from .stack import Stack

SCOPES = ("denoiser", "modules", "stack")


def scope_of(name: str, correct: int = 0) -> Scope:
    """The scope that a word of `SCOPES` stands for."""
    if name not in SCOPES:
        raise unknown("scope", str(name), SCOPES)
    correct = confirm("correct", correct, one_of(0, 1, 2, 3), GOT)
    if name == "denoiser":
        return Denoiser(correct=correct)
    if correct:
        raise InvalidOptionError(f"correct={correct} is for scope='denoiser', not for {name!r}")
    return Modules() if name == "modules" else Stack(0)
