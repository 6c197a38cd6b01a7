"""What an exchange came to: the book after it, and how."""

from __future__ import annotations

from dataclasses import dataclass

from .account import Account


@dataclass(frozen=True)
class Outcome:
    """`known`: the gain in time was computed."""

    account: Account
    how: str
    known: bool = True


def unknown_effect(account: Account, why: str) -> Outcome:
    """Nothing is counted, for this reason."""
    return Outcome(account, why, known=False)


def number(value: object) -> float | None:
    """A parameter as a number; None for what is none."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
