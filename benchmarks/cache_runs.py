"""What the cache benchmarks share: a world to run in, the work a run really did, and how close its pictures are.

Nothing here believes a method's own report: computed forwards are counted at the denoiser's linear layers, so
that ours and the peers' are counted alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

from diffaccel import quality, testbed

STEPS = 28
REFERENCE_STEPS = 112  # four times as many: what the 28 steps are an approximation of
FULL_SHARE = 0.95  # a call that does at least this share of a plain call's linear work is a full-stack forward
PSNR_CAP_DB = 100.0  # identical pictures have no finite PSNR, and a mean needs one


@dataclass(frozen=True)
class World:
    """One testbed with its prompts; prompt i always starts from the noise of `seed` + i, whatever the batch."""

    kind: str
    prompts: tuple[str, ...]
    seed: int = 0
    dtype: str = "float32"  # or "bfloat16": of everything that runs, plain and accelerated

    def load(self, **options: Any) -> Any:
        """A fresh, plain pipeline. FileNotFoundError where this kind has no trained weights (yet)."""
        pipe = testbed.load(self.kind, **{"torch_dtype": getattr(torch, self.dtype), **options})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def generate(self, pipe: Any, steps: int, batch: int = 8, count: int | None = None, **options: Any) -> np.ndarray:
        """Pictures [P, H, W, 3] or videos [P, F, H, W, 3] in 0..1, float, for the first `count` prompts."""
        prompts = self.prompts[: count or len(self.prompts)]
        kwargs = {**testbed.call_kwargs(self.kind), "num_inference_steps": steps, "output_type": "np", **options}
        out = []
        for start in range(0, len(prompts), batch):
            chunk = list(prompts[start : start + batch])
            seeds = range(self.seed + start, self.seed + start + len(chunk))
            generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
            result = pipe(chunk, generator=generators, **kwargs)
            out.append(np.asarray(result.images if hasattr(result, "images") else result.frames))
        return np.concatenate(out)


def world(kind: str, count: int, split: str = "test", dtype: str = "float32") -> World:
    """The first `count` prompts of a split; "test" is held out of the training of the weights."""
    return World(kind, tuple(testbed.prompts(split, count, kind=kind)), dtype=dtype)


# ---- work ----------------------------------------------------------------------------------------------------------


def denoisers(pipe: Any) -> list[torch.nn.Module]:
    """The denoiser, or both of them (Wan 2.2)."""
    found = [getattr(pipe, name, None) for name in ("transformer", "transformer_2", "unet")]
    return [module for module in found if module is not None]


@dataclass
class Work:
    """Multiply-adds in linear layers, per denoiser call and sample of the batch."""

    calls: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def per_sample(self) -> list[float]:
        return [work / count for work, count in zip(self.calls, self.samples, strict=True)]


@contextmanager
def counting(pipe: Any) -> Iterator[Work]:
    """Count the work of every denoiser call. Attention and convolutions are left out: they go with the linears."""
    work, open_calls = Work(), [False]

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        work.calls.append(0.0)
        work.samples.append(len(hidden) if isinstance(hidden, torch.Tensor) else 1)
        open_calls[0] = True

    def leave(*_: Any) -> None:
        open_calls[0] = False

    def add(module: torch.nn.Linear, args: tuple[torch.Tensor, ...], _: Any) -> None:
        if open_calls[0]:
            work.calls[-1] += args[0].numel() * module.out_features

    handles = []
    for denoiser in denoisers(pipe):
        handles.append(denoiser.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(denoiser.register_forward_hook(leave))
        linears = [m for m in denoiser.modules() if isinstance(m, torch.nn.Linear)]
        handles += [module.register_forward_hook(add) for module in linears]
    try:
        yield work
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Yardstick:
    """What a plain run does: work of one call and sample, and calls per step (guidance branches)."""

    work: float
    branches: int

    def counts(self, work: Work, prompts: int) -> dict[str, float]:
        """Means per branch and run (one prompt): full-stack forwards, and all work in units of a plain forward."""
        runs = prompts * self.branches
        shares = [value / self.work for value in work.per_sample()]
        full = sum(n for share, n in zip(shares, work.samples, strict=True) if share >= FULL_SHARE)
        equivalent = sum(share * n for share, n in zip(shares, work.samples, strict=True))
        return {"computed": full / runs, "equivalent": equivalent / runs}


def yardstick(place: World, pipe: Any, steps: int = 3) -> Yardstick:
    """Measured on one plain run of a few steps."""
    with counting(pipe) as work:
        place.generate(pipe, steps, batch=1, count=1)
    return Yardstick(max(work.per_sample()), round(len(work.calls) / steps))


# ---- pictures ------------------------------------------------------------------------------------------------------


def psnr_each(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """PSNR in dB of each prompt's picture, or its mean over a video's frames; capped, so identical ones have one."""
    pairs = zip(reference, candidate, strict=True)
    return np.array([min(quality.psnr(a[None], b[None]), PSNR_CAP_DB) for a, b in pairs])


def ssim_mean(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Mean SSIM over prompts (and frames)."""
    return float(quality.ssim(reference, candidate))


def fidelity(references: Mapping[str, np.ndarray], pictures: np.ndarray, prompts: Sequence[str]) -> dict[str, Any]:
    """Per reference: mean, lowest and per-prompt PSNR in dB and mean SSIM; and the prompt score."""
    out: dict[str, Any] = {}
    for name, reference in references.items():
        each = psnr_each(reference, pictures)
        out[name] = {
            "psnr_db": round(float(each.mean()), 3),
            "psnr_lowest_db": round(float(each.min()), 3),
            "ssim": round(ssim_mean(reference, pictures), 5),
            "psnr_each_db": [round(float(v), 3) for v in each],
        }
    out["score"] = round(float(testbed.score(pictures, list(prompts))["score"]), 4)
    return out


# ---- time ----------------------------------------------------------------------------------------------------------


def interleaved(plain: Callable[[], Any], candidate: Callable[[], Any], rounds: int) -> dict[str, float]:
    """plain, candidate, plain, candidate, ... of calls that ran before: medians, and candidate / plain.

    CPU seconds stand beside wall seconds, because other jobs of the machine are in the wall clock.
    """
    seconds: dict[str, list[float]] = {"plain": [], "candidate": []}
    cpu: dict[str, list[float]] = {"plain": [], "candidate": []}
    for _ in range(rounds):
        for name, call in (("plain", plain), ("candidate", candidate)):
            wall, process = time.perf_counter(), time.process_time()
            call()
            seconds[name].append(time.perf_counter() - wall)
            cpu[name].append(time.process_time() - process)
    return {
        "plain_s": round(median(seconds["plain"]), 4),
        "candidate_s": round(median(seconds["candidate"]), 4),
        "wall_ratio": round(median(seconds["candidate"]) / median(seconds["plain"]), 4),
        "cpu_ratio": round(median(cpu["candidate"]) / median(cpu["plain"]), 4),
        "rounds": rounds,
    }
