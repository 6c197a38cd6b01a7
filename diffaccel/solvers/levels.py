"""What a scheduler's loop looks like to a solver: an ODE dx/ds = slope in the noise level s.

Flow models: s is sigma, x the sample and the slope the velocity. Models that predict epsilon or v: s is k-diffusion's
sigma, x = x0 + s * noise, and the slope epsilon (Karras et al. 2022, arXiv 2206.00364, equation 1 with s(t) = 1).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.sampling import (
    EPSILON,
    FLOW,
    VELOCITY,
    draws_noise,
    in_order,
    noise_levels,
    prediction_of,
    sample_of,
    tried_beforehand,
    twin,
)

if TYPE_CHECKING:
    from ..core.protocols import Scheduler

ARGUMENTS = ["model_output", "timestep", "sample"]


class Ode(NamedTuple):
    """A loop as an ODE.

    Attributes:
        at: noise levels of the loop's steps, and where the last one ends.
        kind: what the denoiser predicts, as `core.sampling` has it.
        scaled: samples are those of a variance-preserving process, x / sqrt(1 + s^2) (DDIM, DPM++; not Euler).
    """

    at: tuple[float, ...]
    kind: str
    scaled: bool

    def scale(self, at: float) -> float:
        """A sample of the scheduler's at this noise level, times this, is x."""
        return math.sqrt(1.0 + at * at) if self.scaled else 1.0

    def noise(self, at: float) -> float:
        """The share of noise in a sample at this level, 0 to 1: a flow model's sigma."""
        return abs(at - self.at[-1]) if self.kind == FLOW else at / (1.0 + at)

    def at_noise(self, noise: float) -> float:
        """The level at which a sample holds this share of noise; the inverse of `noise`."""
        if self.kind != FLOW:
            return noise / (1.0 - noise)
        return self.at[-1] + noise if self.at[0] > self.at[-1] else self.at[-1] - noise

    def cost(self, here: float, end: float) -> float:
        """By how much a relative error of the slope of 1 moves the latents over a step, in units of their scale."""
        return abs(end - here) / (1.0 if self.kind == FLOW else 1.0 + here)

    def slope(self, output: torch.Tensor, x: torch.Tensor, at: float) -> torch.Tensor:
        """dx/ds from the denoiser's output, in float32."""
        output = output.float()
        if self.kind != VELOCITY:
            return output
        alpha = 1.0 / math.sqrt(1.0 + at * at)
        return alpha * output + (at * alpha * alpha) * x


def ode_of(scheduler: Scheduler, timesteps: Sequence[float], sigmas: Sequence[float]) -> Ode | None:
    """The loop of these timesteps and sigmas; None where its noise levels are unknown."""
    kind = prediction_of(scheduler)
    if kind not in (FLOW, EPSILON, VELOCITY):
        return None
    at = noise_levels(scheduler, timesteps, sigmas)
    if not at:
        return None
    last = getattr(scheduler, "final_alpha_cumprod", None)  # where DDIM ends, which keeps no sigmas
    if len(sigmas) < len(timesteps) and last is not None:
        at[-1] = math.sqrt((1.0 - float(last)) / float(last))
    return Ode(tuple(at), kind, kind != FLOW and not _scales_inputs(scheduler))


def _scales_inputs(scheduler: Scheduler) -> bool:
    """Are its samples x itself, which it brings to the denoiser's scale first (EulerDiscreteScheduler)?"""
    scale = getattr(scheduler, "scale_model_input", None)
    if scale is None or len(scheduler.timesteps) == 0:  # type: ignore[attr-defined]
        return False
    tried = twin(scheduler)
    timestep = tried.timesteps[getattr(tried, "begin_index", None) or 0]
    return float(tried.scale_model_input(torch.ones(1), timestep)) != 1.0


def why_not(scheduler: Scheduler, timesteps: Sequence[float], sigmas: Sequence[float]) -> str | None:
    """Why a solver cannot take the steps of this loop, or None. May raise what `step` does."""
    name, config = type(scheduler).__name__, scheduler.config
    ode = ode_of(scheduler, timesteps, sigmas)
    if ode is None:
        return f"{name} gives no noise levels that a solver could go by (prediction {prediction_of(scheduler)!r})"
    if not in_order(ode.at[:-1]) or ode.at[-1] == ode.at[-2]:
        return f"{name} comes to one noise level more than once"
    if list(inspect.signature(type(scheduler).step).parameters)[1:4] != ARGUMENTS:
        return f"{name}.step takes other arguments than an output, a timestep and a sample"
    if draws_noise(scheduler):
        return f"{name} adds fresh noise at its steps: there is no ODE to be solved"
    clips = next((key for key in ("clip_sample", "thresholding") if config.get(key)), None)
    if clips is not None and ode.kind != FLOW:
        return f"{name} changes what the denoiser said ({clips}=True), which a solver would leave out"
    return None if _begins_as_euler(scheduler, ode) else f"{name} solves another ODE than the one known here"


def _begins_as_euler(scheduler: Scheduler, ode: Ode) -> bool:
    """Is its first step Euler's in the ODE? Tried on a copy. Every multistep method begins so (DDIM, DPM++, UniPC are
    exact in other variables, and agree where the output is constant); one that reads outputs otherwise does not."""
    tried: Any = twin(scheduler)
    timestep = tried.timesteps[getattr(tried, "begin_index", None) or 0]
    ramp = torch.linspace(-1.0, 1.0, 64, device=tried.timesteps.device).view(1, 4, 4, 4)
    x, output = (1.0 + ode.at[0]) * ramp, ramp.flip(3) * 0.7
    made = sample_of(tried.step(output, timestep, x / ode.scale(ode.at[0])))
    moved = (ode.at[1] - ode.at[0]) * ode.slope(output, x, ode.at[0])
    wanted = (x + moved) / ode.scale(ode.at[1])
    return float((made - wanted).norm()) <= 0.01 * float(wanted.norm())


def why_never(scheduler: Scheduler) -> str | None:
    """Why a solver can take this scheduler's place in no loop, as far as that can be told before one; or None.

    Tried on a copy that is given a few steps; a scheduler that wants other arguments is left to its first loop.
    """
    name = type(scheduler).__name__
    if getattr(scheduler, "order", 1) > 1:
        return f"{name} calls the denoiser more than once a step"
    return tried_beforehand(scheduler, why_not)
