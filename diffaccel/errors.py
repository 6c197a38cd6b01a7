"""Every error diffaccel raises on purpose, and the sentence helper they share.

A message names the argument, what was given and what is allowed; errors are raised before any compute.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DiffaccelError(Exception):
    """Base of all errors of this package."""


class IncompatibleError(DiffaccelError):
    """Two things that cannot be combined; the message names both."""


class UnsupportedModelError(DiffaccelError):
    """This model (or family) cannot take this accelerator or preset."""


class InvalidOptionError(DiffaccelError, ValueError):
    """An argument has a name or a value that is not allowed."""


class InvalidPipelineError(InvalidOptionError, UnsupportedModelError):
    """The `pipe` argument itself cannot be accelerated (no diffusers pipeline, weights missing)."""


class MissingDependencyError(DiffaccelError, ImportError):
    """An optional package is needed; the message carries the install line."""


class BudgetError(DiffaccelError):
    """The budget cannot be met; the message carries the numbers."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A sentence with the allowed names and, where one is close, the likely intended one."""
    names = sorted(str(a) for a in allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(names) if names else '(none)'}"


def unknown(what: str, name: str, allowed: Iterable[str]) -> InvalidOptionError:
    """The error for a name that is not in a closed list."""
    return InvalidOptionError(f"unknown {what} {name!r}: {nearest(name, allowed)}")
