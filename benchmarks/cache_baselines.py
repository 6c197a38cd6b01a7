"""What a cache has to beat: the same pipeline with fewer steps, with another solver, and with nothing but noise.

`euler-N`             N steps as the pipeline itself would place them
`euler-N-range`       N steps between the first and the last noise level of the plain run
`unipc-N`, `dpm-N`    the solver as a user would swap it in: `from_config(..., use_flow_sigmas=True)`
`unipc-N-range`, ...  the solver on the noise levels of `euler-N-range`, with timesteps that are not cut to whole
                      numbers (diffusers 0.42.1 rounds down, which costs these solvers accuracy)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SOLVERS = ("euler", "unipc", "dpm")
NOISE_CEILING = 1 - 1e-6  # the multistep solvers take logarithms of 1 - sigma


@dataclass(frozen=True)
class Baseline:
    """One plain run with a scheduler of its own."""

    solver: str
    steps: int
    same_range: bool

    @property
    def name(self) -> str:
        return f"{self.solver}-{self.steps}" + ("-range" if self.same_range else "")

    def apply(self, pipe: Any, plain_sigmas: Sequence[float]) -> None:
        """Swap the scheduler; `plain_sigmas` are the plain run's noise levels, the final 0 included."""
        cls, options = _solver(self.solver)
        if self.same_range:
            cls = pinned(cls, within(plain_sigmas, self.steps, 1.0 if self.solver == "euler" else NOISE_CEILING))
        pipe.scheduler = cls.from_config(pipe.scheduler.config, **options)


def baselines(steps: Sequence[int]) -> list[Baseline]:
    """Every solver at every step count, on its own noise levels and on the plain run's range."""
    return [Baseline(solver, n, same) for solver in SOLVERS for n in steps for same in (False, True)]


def _solver(name: str) -> tuple[type, dict[str, Any]]:
    import diffusers

    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    return {
        "euler": (diffusers.FlowMatchEulerDiscreteScheduler, {}),
        "unipc": (diffusers.UniPCMultistepScheduler, flow),
        "dpm": (diffusers.DPMSolverMultistepScheduler, flow),
    }[name]


def within(plain_sigmas: Sequence[float], steps: int, ceiling: float = 1.0) -> list[float]:
    """`steps` noise levels from the plain run's first to its last, spaced as there, and the final 0."""
    levels = list(plain_sigmas[:-1])
    places = np.linspace(0, len(levels) - 1, steps)
    return [min(float(s), ceiling) for s in np.interp(places, np.arange(len(levels)), levels)] + [0.0]


def pinned(base: type, sigmas: Sequence[float]) -> type:
    """A scheduler class like `base` with these noise levels, whatever it is asked for."""

    class Pinned(base):  # type: ignore[valid-type, misc]
        def set_timesteps(
            self,
            num_inference_steps: int | None = None,
            device: Any = None,
            sigmas: Any = None,
            mu: float | None = None,
            timesteps: Any = None,
        ) -> None:
            more = {} if mu is None else {"mu": mu}
            super().set_timesteps(len(levels) - 1, device=device, **more)
            self.sigmas = torch.tensor(levels, dtype=torch.float32)
            self.timesteps = self.sigmas[:-1].to(device) * self.config.num_train_timesteps

    levels = list(sigmas)
    return Pinned


# ---- the noise floor -----------------------------------------------------------------------------------------------


def rounded(dtype: torch.dtype) -> Callable[[Callable[..., Any]], Any]:
    """The pipeline in another dtype: rounding alone."""
    return lambda load: load(torch_dtype=dtype)


def compiled(load: Callable[..., Any]) -> Any:
    """The pipeline with its blocks compiled: other kernels, same mathematics."""
    from diffaccel import accelerate

    return accelerate(load(), preset=None, strict=True, compile=True)


@dataclass(frozen=True)
class Noise:
    """A run that leaves nothing out and differs from the plain one in rounding alone."""

    name: str
    prepare: Callable[[Callable[..., Any]], Any]
    singly: bool = False  # prompts one at a time instead of in batches: other shapes of product, other rounding


def noise(dtype: str) -> list[Noise]:
    """What stands beside every figure in this dtype."""
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    return [
        Noise("one-by-one", lambda load: load(), singly=True),
        Noise(other, rounded(getattr(torch, other))),
        Noise("compile", compiled),
    ]
