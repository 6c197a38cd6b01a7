"""Checks of the options of sparse methods: each raises InvalidOptionError in one sentence."""

from __future__ import annotations

from typing import Any

from ...core import options
from ...errors import InvalidOptionError, unknown

SHARE = options.above(0, 1, "a number above 0 up to 1")
SHARE_OR_0 = options.number(0, 1, "a number from 0 up to 1")
POSITIVE = options.above(0)
COUNT = options.whole(1)
THREE = options.Check(
    "three whole numbers of at least 1 (frames, rows, columns)",
    lambda value: isinstance(value, tuple) and len(value) == 3 and all(options.is_whole(n) and n >= 1 for n in value),
)


def take(config: Any, check: options.Check, *names: str) -> None:
    """Refuse fields of a method's config that are not what `check` allows."""
    options.take(config, check, *names, form="{name}={value}: it must be {allowed}")


def either(density: float | None, name: str, value: object) -> None:
    """Raise where a density is given beside the parameter that it finds."""
    if density is not None and value is not None:
        raise InvalidOptionError(f"density={density!r} finds {name}, so {name}={value!r} cannot be given as well")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise, with the nearest name, unless `value` is one of `allowed`."""
    if value not in allowed:
        raise unknown(name, value, allowed)
