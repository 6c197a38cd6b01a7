"""The published step caches, each one composition of gate, predictor, guards and scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from ..levers import PLACE
from .base import StepCache


class _Methods(Mapping[str, type[StepCache]]):
    """Override value -> config class; a class is imported when it is first asked for."""

    def __getitem__(self, name: str) -> type[StepCache]:
        return cast("type[StepCache]", PLACE.levers[name].config())

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(PLACE.levers))

    def __len__(self) -> int:
        return len(PLACE.levers)


METHODS: Mapping[str, type[StepCache]] = _Methods()

__all__ = ["METHODS", "StepCache"]
