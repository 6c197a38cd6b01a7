"""Checks that the configs of all levers share: one sentence per fault, plain Python where NumPy values came in."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, TypeVar, cast

from ..errors import InvalidOptionError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

# How a refusal names the option: `{value}` is its shortened repr, `{allowed}` what the check allows.
GIVEN = "{name}={value}: must be {allowed}"
GOT = "{name} must be {allowed}, got {value}"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlevel = 2


class Check(NamedTuple):
    """What an option may be: the words for it, and the test of a plain value."""

    allowed: str
    good: Callable[[object], bool]

    def or_none(self) -> Check:
        """The same, or None."""
        return Check(f"{self.allowed}, or None", lambda value: value is None or self.good(value))


def is_whole(value: object) -> TypeGuard[int]:
    """Is it an integer, and not True or False?"""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Is it a finite number, and not True or False?"""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


WHOLE_BYTES = "a whole number of bytes, {least} or more"
BOOLEAN = Check("True or False", lambda value: isinstance(value, bool))
NUMBER = Check("a number", is_number)
LIMIT = Check("a number", lambda value: is_number(value) or value in (math.inf, -math.inf))  # may be no limit at all


def whole(least: int, words: str = "a whole number of at least {least}") -> Check:
    """A whole number of at least `least`; `words` are for the sentence."""
    return Check(words.format(least=least), lambda value: is_whole(value) and value >= least)


def number(least: float, most: float = math.inf, words: str = "a number of at least {least}") -> Check:
    """A finite number from `least` to `most`, both included."""
    return Check(words.format(least=least, most=most), lambda value: is_number(value) and least <= value <= most)


def above(bound: float, most: float = math.inf, words: str = "a number above {bound}") -> Check:
    """A finite number above `bound` (not included), up to `most`."""
    return Check(words.format(bound=bound, most=most), lambda value: is_number(value) and bound < value <= most)


def one_of(*values: int | str) -> Check:
    """One of a few whole numbers and words."""
    listed = ", ".join(map(repr, values[:-1]))

    def good(value: object) -> bool:
        return (is_whole(value) or isinstance(value, str)) and value in values

    return Check(f"{listed} or {values[-1]!r}", good)


def plain(value: T) -> T:
    """The value without NumPy: its scalars and arrays of no dimension become Python's, others lists; tuples and lists
    likewise, item by item. Anything else is returned as it is."""
    return cast(T, _plain(value))


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value


def short(value: object) -> str:
    """The repr of a value, shortened so that a sentence stays one."""
    return _short.repr(value)


def refuse(name: str, value: object, allowed: str, form: str = GIVEN) -> InvalidOptionError:
    """The error for an option that is not what is allowed."""
    return InvalidOptionError(form.format(name=name, value=short(value), allowed=allowed))


def confirm(name: str, value: T, check: Check, form: str = GIVEN) -> T:
    """The value in plain Python. Raises InvalidOptionError unless the check holds."""
    value = plain(value)
    if not check.good(value):
        raise refuse(name, value, check.allowed, form)
    return value


def take(config: object, check: Check, *names: str, prefix: str = "", form: str = GIVEN) -> None:
    """Confirm these fields of a (frozen) config, and leave plain Python values in them."""
    for name in names:
        object.__setattr__(config, name, confirm(prefix + name, getattr(config, name), check, form))


def take_plain(config: DataclassInstance) -> None:
    """Leave plain Python values in all fields of a (frozen) config."""
    for field in fields(config):
        object.__setattr__(config, field.name, plain(getattr(config, field.name)))


def choose_name(config: object, name: str, allowed: Iterable[str], prefix: str = "") -> None:
    """Raise, with the nearest name, unless a field is one of the allowed names."""
    value, names = getattr(config, name), tuple(allowed)
    if not isinstance(value, str) or value not in names:
        raise InvalidOptionError(f"{prefix}{name}={short(value)}: {nearest(str(value), names)}")
