"""What some methods, ours and the peers', must know of a model beforehand, measured on training prompts."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cache_runs import World

from diffaccel.caching.gates.base import relative_l1
from diffaccel.caching.gates.teacache import fit_polynomial

GATE_TENSORS = ("transformer_blocks.0.norm1", "condition_embedder")  # FLUX, Wan: what TeaCache looks at


@dataclass(frozen=True)
class Context:
    """The run's number of steps, prompts to calibrate on (not the measured ones), calls per step."""

    steps: int
    train: World
    branches: int = 1

    @functools.cached_property
    def magnitude_ratios(self) -> list[float]:
        """MagCache's ratios of the first guidance branch, by diffusers' own calibration, which prints them."""
        from diffusers import MagCacheConfig

        pipe, printed = self.train.load(), io.StringIO()
        pipe.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=self.steps))
        with contextlib.redirect_stdout(printed):
            self.train.generate(pipe, self.steps)
        lists = [ast.literal_eval(line) for line in printed.getvalue().splitlines() if line.startswith("[1.0")]
        return [float(value) for value in lists[0]]

    @functools.cached_property
    def polynomial(self) -> list[float]:
        """TeaCache's coefficients: change of the output against change of the gate tensor, degree 4."""
        pipe = self.train.load()
        names = dict(pipe.transformer.named_modules())
        watched = next(names[name] for name in GATE_TENSORS if name in names)
        gates: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        handles = [
            watched.register_forward_hook(lambda _, args, output: gates.append(output[0])),
            pipe.transformer.register_forward_hook(lambda _, args, output: outputs.append(output[0])),
        ]
        try:
            for i in range(len(self.train.prompts)):
                one = World(self.train.kind, (self.train.prompts[i],), self.train.seed + i)
                one.generate(pipe, self.steps, batch=1)
        finally:
            for handle in handles:
                handle.remove()
        fit = fit_polynomial(self._changes(gates), self._changes(outputs))
        return list(fit.coefficients)

    def _changes(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """Relative change from each step to the next within every run and branch."""
        stride, calls = self.branches, self.steps * self.branches
        pairs = [(i, i - stride) for i in range(len(tensors)) if i % calls >= stride]
        return [float(relative_l1(tensors[now], tensors[before])) for now, before in pairs]


def even_steps(total: int, computed: int, first: int = 1) -> list[int]:
    """Flags, 1 = computed: the first `first` steps, and the rest spread evenly up to the last one."""
    places: set[Any] = set(range(first))
    rest = computed - first
    places |= {first - 1 + round((total - first) * (i + 1) / rest) for i in range(rest)}
    return [int(t in places) for t in range(total)]
