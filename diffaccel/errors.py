"""Every error diffaccel raises on purpose, and the sentence helper they share.

A message names the argument, what was given and what is allowed; errors are raised before any compute.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


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


class UnknownVerbError(InvalidOptionError, AttributeError):
    """`pipe.enable_...` or `pipe.disable_...` of a name that there is not (an AttributeError, so `hasattr` works)."""


LISTED = 110  # characters up to which a sentence lists all allowed names


def nearest(name: str, allowed: Iterable[str], likely: Sequence[str] | None = None) -> str:
    """A sentence with the names that were likely meant (found by their letters, or `likely`, best first); a short list
    of allowed names is given in full."""
    names = sorted({str(a) for a in allowed})
    close, listed = closest(name, names) if likely is None else likely, ", ".join(names)
    if len(listed) <= LISTED:
        return (f"did you mean {close[0]!r}? " if close else "") + f"Allowed: {listed or '(none)'}"
    if close:
        *most, last = map(repr, close)
        return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"
    return f"Allowed: {few(names)}"


def unknown(what: str, name: str, allowed: Iterable[str], likely: Sequence[str] | None = None) -> InvalidOptionError:
    """The error for a name that is not in a closed list; `likely` as in `nearest`."""
    return InvalidOptionError(f"unknown {what} {clipped(name)!r}: {nearest(name, allowed, likely)}")


def clipped(text: str, most: int = 60) -> str:
    """The text itself, or its beginning where it is long."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def few(names: Iterable[str], most: int = LISTED) -> str:
    """Names in a row, as many as go into so many characters, and how many more there are."""
    rest = list(names)
    shown: list[str] = []
    while rest and len(", ".join([*shown, rest[0]])) <= most:
        shown.append(rest.pop(0))
    shown = shown or [clipped(rest.pop(0), most)] if rest else shown
    return ", ".join(shown) + (f" and {len(rest)} more" if rest else "")


def closest(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names that look most like one that there is not, best first; none where nothing is near."""
    scored = sorted((-_likeness(name, other), other) for other in names)
    return [other for score, other in scored[:most] if -score >= 0.6]


def _likeness(given: str, name: str) -> float:
    """0 to 1. Case and separators do not count; of leading words that both have, only what follows them does."""
    ours, theirs = _words(given), _words(name)
    while len(ours) > 1 and theirs and ours[0] == theirs[0]:
        ours, theirs = ours[1:], theirs[1:]
    if not theirs:  # the name itself with a word too many, or the owner of the name that was meant
        return 0.6 + 0.4 * len(name) / len(given)
    a, b = "".join(ours), "".join(theirs)
    score = difflib.SequenceMatcher(None, a, b).ratio()
    if len(a) > 2 and (b.startswith(a) or (len(b) > 2 and (a in b or b in a) and 2 * min(len(a), len(b)) > len(a))):
        score = max(score, 0.6 + 0.4 * min(len(a), len(b)) / max(len(a), len(b)))
    shared = max((len(word) for word in set(ours) & set(theirs)), default=0)
    return max(score, 0.6 + 0.01 * shared if shared > 3 else 0)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word] or [""]
