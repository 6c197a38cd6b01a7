"""What acceleration costs in fidelity and gains in time: plain and accelerated runs of the same noise, in turn.

Per prompt the plain and the accelerated call stand side by side (plain, ours; ours, plain; ...), so that a machine
that gets warm or busy slows both alike. The speed is the median of the prompts' ratios; the first pair warms up, and
its time counts only where there is no other.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import InvalidOptionError, nearest
from .metrics import psnr, ssim

OURS = ("prompt", "generator", "output_type", "return_dict", "latents")  # arguments of a call that are set here
SMALLEST = 11  # pixels a side below which there is no SSIM


class Handle(Protocol):
    """An accelerated pipeline, and a way to have it plain for a while."""

    @property
    def pipe(self) -> Any:
        """The pipeline."""

    def aside(self, verb: str) -> AbstractContextManager[object]:
        """The pipeline as if it had never been accelerated."""


@dataclass(frozen=True)
class Measurement:
    """Per prompt: PSNR in dB (infinite where identical), SSIM (None below 11 pixels), and both calls' seconds."""

    psnr_db: tuple[float, ...]
    ssim: tuple[float | None, ...]
    plain_s: tuple[float, ...]
    ours_s: tuple[float, ...]

    @property
    def speed(self) -> float:
        """Median over prompts of plain seconds / accelerated seconds."""
        ratios = [plain / ours for plain, ours in zip(self.plain_s, self.ours_s, strict=True)]
        return median(ratios[1:] or ratios)

    def summary(self) -> dict[str, object]:
        """Plain data for a plan. Identical pictures have no PSNR: they are left out of it, and counted."""
        differ = [value for value in self.psnr_db if value != float("inf")]
        similar = [value for value in self.ssim if value is not None]
        out: dict[str, object] = {}
        if differ:
            out |= {"psnr_db": round(fmean(differ), 2), "psnr_lowest_db": round(min(differ), 2)}
        if len(differ) < len(self.psnr_db):
            out["identical"] = len(self.psnr_db) - len(differ)
        if similar:
            out["ssim"] = round(fmean(similar), 5)
        return {**out, "speed": round(self.speed, 3), "prompts": len(self.psnr_db)}


# ---- bad input -----------------------------------------------------------------------------------------------------


def texts_of(prompts: object, verb: str) -> list[str]:
    """One prompt or several, as a list. Raises InvalidOptionError for anything else, or none."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts) if isinstance(prompts, Sequence) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidOptionError(f"{verb}: prompts must be a text or a list of texts, got {_short(prompts)}")
    return texts


def seeds_of(seeds: object, count: int, verb: str) -> list[int]:
    """A seed per prompt: those given, or from the first one on."""
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds >= 0:
        return list(range(seeds, seeds + count))
    listed = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in listed)
    if len(listed) != count or not whole:
        raise InvalidOptionError(
            f"{verb}: seeds must be the first seed (0 or more) or one for each of the {count} prompts, got "
            f"{_short(seeds)}"
        )
    return listed


def require_call(pipe: Any, call: Mapping[str, object], verb: str) -> None:
    """Refuse arguments that the pipeline's call does not take, and those that a measurement sets itself."""
    name, known = type(pipe).__name__, inspect.signature(type(pipe).__call__).parameters
    if "prompt" not in known:
        raise InvalidOptionError(f"{verb}: {name} takes no prompt, so there is nothing to run it on")
    for key in call:
        if key in OURS:
            raise InvalidOptionError(f"{verb} sets {key} itself: give prompts and seeds, and leave {key} out")
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise InvalidOptionError(f"{verb}: {name} takes no {_short(key)}: {nearest(str(key), known)}")
    for key in call:
        if key.startswith("num_") and key.endswith("_per_prompt") and call[key] not in (None, 1):
            raise InvalidOptionError(f"{verb}: {key}={_short(call[key])} must be 1: give more prompts instead")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- runs ----------------------------------------------------------------------------------------------------------


def pictures_of(output: Any) -> np.ndarray:
    """Pictures [B, H, W, 3] or videos [B, F, H, W, 3] in 0..1 of a pipeline's output (`output_type="np"`)."""
    found = getattr(output, "images", None)
    found = getattr(output, "frames", None) if found is None else found
    if found is None:
        raise InvalidOptionError(f"{type(output).__name__} holds neither images nor frames: there is no PSNR of it")
    return np.asarray(found)


def generate(pipe: Any, prompts: Sequence[str], seeds: Sequence[int], call: Mapping[str, Any]) -> np.ndarray:
    """Pictures of one call; prompt i starts from the noise of seed i, whatever the batch."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    single = len(prompts) == 1
    output = pipe(
        prompt=prompts[0] if single else list(prompts),
        generator=generators[0] if single else generators,
        **call,
        output_type="np",
    )
    return pictures_of(output)


@contextmanager
def untouched(pipe: Any) -> Iterator[None]:
    """Afterwards the pipeline's and its scheduler's attributes, and the random state, are as they were."""
    scheduler = getattr(pipe, "scheduler", None)
    owners = [pipe] if scheduler is None else [pipe, scheduler]
    before = [dict(vars(owner)) for owner in owners]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for owner, old in zip(owners, before, strict=True):
                vars(owner).clear()
                vars(owner).update(old)


def measure(handle: Handle, prompts: object, seeds: object, call: Mapping[str, object]) -> Measurement:
    """Run every prompt plain and accelerated; see `Acceleration.measure`."""
    pipe = handle.pipe
    texts = texts_of(prompts, "measure")
    given = seeds_of(seeds, len(texts), "measure")
    require_call(pipe, call, "measure")
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}

    def timed(who: str, at: int) -> np.ndarray:
        began = time.perf_counter()
        made = generate(pipe, [texts[at]], [given[at]], call)
        seconds[who].append(time.perf_counter() - began)
        return made

    with untouched(pipe):
        pairs = list(_in_turn(handle, len(texts), timed))
    big = min(pairs[0][0].shape[-3:-1]) >= SMALLEST
    return Measurement(
        tuple(psnr(plain, ours) for plain, ours in pairs),
        tuple(ssim(plain, ours) if big else None for plain, ours in pairs),
        tuple(seconds["plain"]),
        tuple(seconds["ours"]),
    )


def _in_turn(
    handle: Handle, count: int, timed: Callable[[str, int], np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(plain, accelerated) pictures per prompt; two runs of one kind in a row share one undo of the acceleration."""
    with ExitStack() as plain:
        is_plain = False
        for at in range(count):
            made = {}
            for who in ("plain", "ours") if at % 2 == 0 else ("ours", "plain"):
                if who == "plain" and not is_plain:
                    plain.enter_context(handle.aside("measure"))
                elif who == "ours":
                    plain.close()
                is_plain = who == "plain"
                made[who] = timed(who, at)
            yield made["plain"], made["ours"]
