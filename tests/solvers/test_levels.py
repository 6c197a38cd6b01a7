"""Which schedulers can be replaced, and that the ODE is theirs."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from diffaccel.core.clock import schedule_of
from diffaccel.solvers.arrays import Arrays, resampled
from diffaccel.solvers.levels import ode_of, why_never, why_not

SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
VELOCITY = {"prediction_type": "v_prediction"}
DDIM = {"clip_sample": False}

SOLVED: list[tuple[str, dict[str, Any]]] = [
    ("EulerDiscreteScheduler", SCALED),
    ("EulerDiscreteScheduler", SCALED | VELOCITY | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}),
    ("LMSDiscreteScheduler", SCALED),
    ("DDIMScheduler", SCALED | DDIM),
    ("DDIMScheduler", SCALED | DDIM | {"set_alpha_to_one": False, "steps_offset": 1}),
    ("DDIMScheduler", SCALED | DDIM | VELOCITY),
    ("UniPCMultistepScheduler", SCALED),
    ("UniPCMultistepScheduler", FLOW),
    ("DPMSolverMultistepScheduler", SCALED | VELOCITY),
    ("DPMSolverMultistepScheduler", FLOW),
    ("DEISMultistepScheduler", SCALED),
    ("CogVideoXDDIMScheduler", DDIM | VELOCITY | {"rescale_betas_zero_snr": True}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}),
    ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True, "shift_terminal": 0.02}),
]
NOISE, TWICE = "adds fresh noise", "more than once"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("EulerAncestralDiscreteScheduler", SCALED, NOISE),
    ("DDPMScheduler", SCALED, NOISE),
    ("LCMScheduler", SCALED, NOISE),
    ("TCDScheduler", SCALED, NOISE),
    ("SASolverScheduler", SCALED, NOISE),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, NOISE),
    ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, NOISE),
    ("FlowMatchLCMScheduler", {}, NOISE),
    ("HeunDiscreteScheduler", SCALED, TWICE),
    ("FlowMatchHeunDiscreteScheduler", {}, TWICE),
    ("PNDMScheduler", SCALED | {"skip_prk_steps": True}, TWICE),
    ("DEISMultistepScheduler", FLOW, TWICE),
    ("DDIMScheduler", SCALED, "clip_sample"),
    ("DDIMScheduler", SCALED | DDIM | {"prediction_type": "sample"}, "no noise levels"),
    ("EDMEulerScheduler", {}, "another ODE"),
]


def made(name: str, config: dict[str, Any], steps: int = 8) -> Any:
    scheduler = getattr(diffusers, name)(**config)
    scheduler.set_timesteps(steps, **({"mu": 1.0} if config.get("use_dynamic_shifting") else {}))
    return scheduler


@pytest.mark.parametrize(("name", "config"), SOLVED)
def test_first_steps_are_the_schedulers_own(name: str, config: dict[str, Any]) -> None:
    """Euler's step in our ODE is what every multistep method begins with."""
    scheduler = made(name, config)
    ode = ode_of(scheduler, *schedule_of(scheduler))
    assert ode is not None and len(ode.at) == 9
    assert why_not(scheduler, *schedule_of(scheduler)) is None and why_never(scheduler) is None
    generator = torch.Generator().manual_seed(0)
    output, sample = (torch.randn(1, 4, 4, 4, generator=generator) for _ in range(2))
    if hasattr(scheduler, "scale_model_input"):
        scheduler.scale_model_input(sample, scheduler.timesteps[0])
    x = sample * ode.scale(ode.at[0])
    ours = (x + (ode.at[1] - ode.at[0]) * ode.slope(output, x, ode.at[0])) / ode.scale(ode.at[1])
    theirs = scheduler.step(output, scheduler.timesteps[0], sample).prev_sample
    assert (ours - theirs).norm() < 2e-3 * theirs.norm()


@pytest.mark.parametrize(("name", "config", "why"), REFUSED)
def test_others_are_refused_by_name(name: str, config: dict[str, Any], why: str) -> None:
    reason = why_never(getattr(diffusers, name)(**config))
    assert reason is not None and reason.startswith(name) and why in reason
    assert len(reason) < 300


@pytest.mark.parametrize(("name", "config"), [row for row in SOLVED if "Cog" not in row[0]])
def test_timesteps_stand_for_noise_levels(name: str, config: dict[str, Any]) -> None:
    """The scheduler's own pairs of level and timestep; whole timesteps are cut off by diffusers, not rounded."""
    scheduler = made(name, config)
    arrays, ode = Arrays(scheduler), ode_of(scheduler, *schedule_of(scheduler))
    assert ode is not None and arrays.why_not() is None
    for at, time in zip(ode.at, scheduler.timesteps.tolist(), strict=False):
        assert arrays.time(at) == pytest.approx(time, abs=1.0 if arrays.whole else 0.05)
    snapped = arrays.nearest(ode.at[3])
    assert arrays.nearest(snapped) == pytest.approx(snapped, rel=1e-6)


def test_arrays_are_written_in_place() -> None:
    scheduler = made("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
    times, views = scheduler.timesteps, list(scheduler.timesteps)
    Arrays(scheduler).write([0.5, 0.25, 0.0, 0.0], 5)
    assert scheduler.timesteps is times and [float(view) for view in views[5:]] == [500.0, 250.0, 0.0]
    assert scheduler.sigmas.tolist()[5:] == [0.5, 0.25, 0.0, 0.0]


def test_a_grid_of_another_length_is_interpolated() -> None:
    assert resampled([0.9, 0.5, 0.1], 3) == [0.9, 0.5, 0.1]
    assert resampled([0.8, 0.2], 3) == pytest.approx([0.8, 0.4, 0.2])
    assert resampled([0.9, 0.5, 0.1], 1) == pytest.approx([0.9])
    scheduler = made("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
    note = Arrays(scheduler).fill([1.0, 0.5])
    assert note is not None and "2 levels" in note and "8 steps" in note
    assert scheduler.sigmas[0] == 1.0 and scheduler.sigmas[-2] == 0.5 and scheduler.sigmas[-1] == 0.0
