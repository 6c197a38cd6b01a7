"""Plain runs, written down: what goes into the scheduler at every step (as Gram matrices), and the pictures."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.clock import schedule_of
from ..core.sampling import twin
from ..errors import IncompatibleError
from ..quality.measurement import generate
from .response import response, timesteps_left

COLUMNS = 1 << 20  # of a Gram matrix's sums at once: so many doubles per step


@dataclass(frozen=True)
class Recording:
    """What plain runs of a few prompts show.

    Attributes:
        gram: inner products of the steps' outputs, per prompt, over the number of entries: [P, N, N].
        response: what the scheduler makes of each output in the end, [N].
        axis: noise levels of the steps (timesteps, where the scheduler has none), [N].
        coordinate: "sigma" or "timestep".
        whole: does the loop begin at full noise (image to image does not)?
        pictures: [P, H, W, 3] or [P, F, H, W, 3].
        seconds: per prompt, of its call.
    """

    gram: np.ndarray
    response: np.ndarray
    axis: tuple[float, ...]
    coordinate: str
    whole: bool
    pictures: np.ndarray
    seconds: float


class _Ear:
    """Stands in for `step` of a scheduler instance and keeps what it is given. Same name and signature."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.fn = getattr(type(scheduler), "step").__get__(scheduler)  # noqa: B009 - the class's own, untyped
        self.outputs: list[torch.Tensor] = []
        self.fresh: Any = None  # the scheduler as it was before its first step
        functools.update_wrapper(self, self.fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fresh is None:
            self.fresh = twin(self.scheduler)
        self.outputs.append(args[0] if args else kwargs["model_output"])
        return self.fn(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A pipeline may copy its scheduler in mid-run; the copy's method must step the copy, unheard.
        copied = memo.get(id(self.scheduler), self.scheduler)
        return type(copied).step.__get__(copied)


@contextmanager
def _listening(pipe: Any) -> Iterator[_Ear]:
    ear = _Ear(pipe.scheduler)
    vars(pipe.scheduler)["step"] = ear
    try:
        yield ear
    finally:
        del vars(ear.scheduler)["step"]


def record(pipe: Any, prompts: Sequence[str], seeds: Sequence[int], call: Mapping[str, Any], batch: int) -> Recording:
    """Run the plain pipeline on every prompt, `batch` at once; prompt i starts from the noise of seed i."""
    grams, pictures, seconds = [], [], 0.0
    last: _Ear | None = None
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        with _listening(pipe) as ear:
            began = time.perf_counter()
            pictures.append(generate(pipe, prompts[part], seeds[part], call))
            seconds += time.perf_counter() - began
        _require_one_call_a_step(ear, pipe)
        last = ear
        grams += gram_of(ear.outputs, len(pictures[-1]))
    assert last is not None
    axis, coordinate = axis_of(last.fresh)
    whole = len(axis) == len(last.fresh.timesteps)
    return Recording(
        np.stack(grams),
        response(last.fresh),
        axis,
        coordinate,
        whole,
        np.concatenate(pictures),
        seconds / len(prompts),
    )


def _require_one_call_a_step(ear: _Ear, pipe: Any) -> None:
    count = 0 if ear.fresh is None else len(timesteps_left(ear.fresh))
    if not ear.outputs or len(ear.outputs) != count:
        raise IncompatibleError(
            f"tune: {type(pipe).__name__} stepped its scheduler {len(ear.outputs)} times where {count} timesteps are "
            "set: only loops of one step per timestep can be tuned"
        )


def gram_of(outputs: Sequence[torch.Tensor], count: int) -> list[np.ndarray]:
    """Per prompt, the inner products of N outputs [P, ...] without their mean, over the number of entries: [N, N].

    The mean goes because weights of a forecast's error sum to 0, so that nothing hangs on it but digits.
    """
    grams = []
    for row in range(count):
        flat = torch.stack([output[row].flatten() for output in outputs])  # [N, D]
        total = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat.device)
        for part in flat.split(COLUMNS, dim=1):
            wide = part.double()
            wide = wide - wide.mean(dim=0)
            total += wide @ wide.T
        grams.append((total / flat.shape[1]).cpu().numpy())
    return grams


def axis_of(scheduler: Any) -> tuple[tuple[float, ...], str]:
    """(coordinates of the steps, their name): noise levels where the scheduler has them, else timesteps."""
    timesteps, sigmas = schedule_of(scheduler)
    begin = len(timesteps) - len(timesteps_left(scheduler))
    return tuple((sigmas or timesteps)[begin : len(timesteps)]), "sigma" if sigmas else "timestep"
