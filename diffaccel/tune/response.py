"""What a scheduler makes of each step's output in the end: read off the scheduler itself, without a model.

The final latents of a deterministic solver are a linear function of the first latents and of what the steps were given
(as long as nothing is clipped): x_N = a x_0 + sum_t w_t v_t. Running a copy of the scheduler with one output of 1 and
all others 0 gives w_t: for Euler the lengths of the steps, for multistep solvers what their histories make of them.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from ..core.clock import position
from ..core.sampling import draws_noise, twin
from ..errors import IncompatibleError

UNIT = 1e-3  # of the outputs: small, so that nothing is clipped
PROBED = 6  # steps of the loop that tells whether a scheduler rolls dice


def timesteps_left(scheduler: Any) -> torch.Tensor:
    """Those of the loop of a scheduler that has taken no step: all, unless it begins late (image to image)."""
    return scheduler.timesteps[position(scheduler) or 0 :]  # type: ignore[no-any-return]


def response(scheduler: Any) -> np.ndarray:
    """w_t, [N], of a scheduler whose timesteps are set and which has taken no step. The scheduler is not changed."""
    count = len(timesteps_left(scheduler))
    outputs = UNIT * torch.eye(count).reshape(count, count, 1, 1, 1)  # of step t: row t is 1
    final = _run(twin(scheduler), outputs)
    return np.asarray((final.flatten() / UNIT).double().numpy())


def _run(scheduler: Any, outputs: torch.Tensor) -> torch.Tensor:
    """The last latents from latents of 0 and these outputs, [N, B, ...]."""
    sample = torch.zeros_like(outputs[0])
    for timestep, output in zip(timesteps_left(scheduler), outputs, strict=True):
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(sample, timestep)  # some find their step there
        sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
    return sample


def require_deterministic(scheduler: Any, verb: str = "tune") -> None:
    """Refuse, by name, a scheduler that draws noise or asks for the model more than once a step. Runs no model."""
    name = type(scheduler).__name__
    if getattr(scheduler, "order", 1) > 1:
        raise IncompatibleError(
            f"{verb}: {name} calls the model more than once a step, so a schedule of steps means nothing: choose one "
            "that calls it once (Euler, DDIM, DPM++ 2M, UniPC)"
        )
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "set_timesteps"):
        raise IncompatibleError(f"{verb}: {name} has no step and set_timesteps")
    if _rolls_dice(scheduler):
        raise IncompatibleError(
            f"{verb}: {name} draws noise at its steps, so two runs cannot be compared: choose a deterministic one "
            "(Euler, DDIM, DPM++ 2M, UniPC)"
        )


def _rolls_dice(scheduler: Any) -> bool:
    """Does a loop draw noise?"""
    copied = twin(scheduler)
    takes_mu = "mu" in inspect.signature(copied.set_timesteps).parameters
    copied.set_timesteps(PROBED, **({"mu": 1.0} if takes_mu else {}))
    return draws_noise(copied)
