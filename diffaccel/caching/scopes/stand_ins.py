"""What the hooks of scopes share: links into forward chains, and stand-ins for the length of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.chain import Link
from ...core.compat import eager


class StandIns:
    """Some hooks of ours, kept outermost, whose modules can be stood in for until the call is over."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.skipped: list[tuple[Any, Any]] = []  # (function reference, body) of modules that sit out this call

    @eager
    def stand_in(self, link: Link, answer: Callable[..., Any]) -> None:
        """`answer` is called in the module's stead until `put_back`."""
        ref = link.hook.fn_ref
        self.skipped.append((ref, link.body))
        ref.forward = answer

    def put_back(self) -> None:
        """Give the modules their forwards back."""
        for ref, body in self.skipped:
            ref.forward = body
        self.skipped.clear()

    def compute(self) -> None:
        """Nothing is done to a computed call."""

    def relink(self) -> None:
        """Put back what others dropped since the last run; stay outermost."""
        for link in self.links:
            link.relink()

    def undo(self) -> None:
        """Leave the model as it was found."""
        for link in reversed(self.links):
            link.remove()
        self.links.clear()
