"""Traced runs of one prompt under one plan, at a place in a batch, on a number of threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..api import accelerate, attach, restore
from ..quality.measurement import generate
from .contender import Contender
from .tracing import Trace, tracing


@dataclass(frozen=True)
class Lab:
    """One pipeline and what it is asked for."""

    pipe: Any
    texts: tuple[str, str]
    seed: int
    call: Mapping[str, Any]
    one: Contender

    def run(
        self,
        keep: int | None,
        row: tuple[int, int] = (0, 1),
        threads: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, Trace]:
        """The first prompt's picture, at a place in its batch, and its trace."""
        place, size = row
        texts, seeds = [self.texts[1]] * size, [self.seed + 1] * size
        texts[place], seeds[place] = self.texts[0], self.seed
        with threaded(threads), on(self.pipe, self.one, more or {}), tracing(self.pipe, row, keep) as trace:
            pictures = generate(self.pipe, texts, seeds, self.call)
        return pictures[place], trace


@contextmanager
def on(pipe: Any, one: Contender, more: Mapping[str, Any]) -> Iterator[None]:
    """The pipeline with a plan, or attached only, which shows its steps."""
    if one.accelerated or more:
        accelerate(pipe, one.preset, **{**one.overrides, **more})
    else:
        attach(pipe)
    try:
        yield
    finally:
        restore(pipe)


@contextmanager
def threaded(count: int | None) -> Iterator[None]:
    """So many threads in PyTorch's kernels; as before afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
