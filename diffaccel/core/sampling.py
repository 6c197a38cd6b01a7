"""What levers that stand around `scheduler.step` ask of it: its call, its state, its noise levels, its draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from .clock import TAPS, schedule_of

if TYPE_CHECKING:
    from .compat import Args, Argument, Component, Kept, Kwargs, Output
    from .protocols import Scheduler

    StepCall = tuple[Args, Kwargs]  # arguments of `scheduler.step`

LEAST_ALPHA = 2.0**-24

# What the denoiser may predict, by the scheduler's own word for it.
FLOW, EPSILON, VELOCITY = "flow_prediction", "epsilon", "v_prediction"


def state_of(scheduler: Scheduler) -> Kwargs:
    """What a scheduler's `step` may change: its attributes, lists and dicts copied, tensors shared.

    Schedulers replace tensors rather than write into them.
    """
    return {key: _shallow(value) for key, value in vars(scheduler).items() if key not in TAPS}


def put_state(scheduler: Scheduler, state: Kwargs) -> None:
    """Give a scheduler a state of `state_of`, which may be given again."""
    own = vars(scheduler)
    for key in [key for key in own if key not in TAPS and key not in state]:
        del own[key]
    own.update({key: _shallow(value) for key, value in state.items()})


def twin(scheduler: Component) -> Component:
    """A scheduler in the same state, to try things on; unwatched.

    Not by `copy`, which leaves `__slotnames__` on a class that it copies for the first time, and classes of diffusers
    are not written to.
    """
    other = object.__new__(type(scheduler))
    put_state(other, state_of(scheduler))
    return other


def _shallow(value: Kept) -> Kept:
    return value.copy() if type(value) in (list, dict) else value


def sample_of(output: Output) -> torch.Tensor:
    """The new latents in what `scheduler.step` returned."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output.prev_sample
    return found


def noisy(kwargs: Kwargs) -> bool:
    """Does the pipeline ask for noise at each step?"""
    return any(isinstance(kwargs.get(name), (int, float)) and kwargs[name] > 0 for name in ("eta", "s_churn"))


def argument(call: StepCall, place: int, name: str) -> Argument:
    """An argument of `scheduler.step(model_output, timestep, sample)`, wherever it was put."""
    args, kwargs = call
    return args[place] if place < len(args) else kwargs[name]


def changed(call: StepCall, output: torch.Tensor, sample: torch.Tensor) -> StepCall:
    """The call with another model output and another sample.

    Pipelines may give the output twice: Cosmos does, as `pred_original_sample` too.
    """
    said = argument(call, 0, "model_output")
    args, kwargs = list(call[0]), {name: output if value is said else value for name, value in call[1].items()}
    for place, name, value in ((0, "model_output", output), (2, "sample", sample)):
        if place < len(args):
            args[place] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def prediction_of(scheduler: Scheduler) -> str:
    """What the denoiser predicts, in the scheduler's words; flow-matching schedulers have none and predict flow."""
    config = getattr(scheduler, "config", {})
    return str(config.get("prediction_type", FLOW))


def from_alphas(scheduler: Scheduler, timesteps: Sequence[float]) -> list[float]:
    """k-diffusion's sigma at each timestep, for schedulers that keep none (DDIM); empty where there are no alphas.

    Alphas of 0 (zero terminal signal-to-noise ratio, as CogVideoX has it) are read as 2**-24, diffusers' own way out.
    """
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None:
        return []
    alphas = alphas.double().clamp(min=LEAST_ALPHA)
    table = ((1 - alphas) / alphas).sqrt().tolist()
    return [table[min(max(round(t), 0), len(table) - 1)] for t in timesteps]


def noise_levels(scheduler: Scheduler, timesteps: Sequence[float], sigmas: Sequence[float]) -> list[float]:
    """Noise levels of a loop's steps, and where its last one ends: sigma for flow models, k-diffusion's for others.

    From its timesteps and the scheduler's sigmas (which may hold one more, the end); empty where they are unknown.
    """
    count = len(timesteps)
    if len(sigmas) >= count > 0:
        at = list(sigmas[: count + 1])
    elif prediction_of(scheduler) == FLOW:
        at = []
    else:
        at = from_alphas(scheduler, timesteps)
    return [*at, 0.0] if at and len(at) == count else at


def in_order(at: Sequence[float]) -> bool:
    """Do the noise levels go one way, none of them twice?"""
    return all(b < a for a, b in pairwise(at)) or all(b > a for a, b in pairwise(at))


def draws_noise(scheduler: Scheduler) -> bool:
    """Does `step` draw random numbers? Tried on a copy that stands where the scheduler stands.

    What it drew may have been multiplied by 0 at this step (SA-Solver at its ends), so the generators are looked at.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or len(timesteps) == 0:
        return False
    tried = twin(scheduler)
    device = getattr(timesteps, "device", torch.device("cpu"))
    sample = torch.linspace(-1, 1, 64, device=device).view(1, 4, 4, 4)
    at = getattr(tried, "begin_index", None) or 0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = _generators(device)
        tried.step(0.5 * sample, timesteps[at], sample)
        return not all(map(torch.equal, before, _generators(device)))


def tried_beforehand(
    scheduler: Scheduler, judge: Callable[[Scheduler, Sequence[float], Sequence[float]], str | None]
) -> str | None:
    """What `judge(scheduler, timesteps, sigmas)` has against a twin that was given a few steps; None: nothing.

    A scheduler that wants other arguments, or refuses in any other way, is left to its first loop.
    """
    shifting = getattr(scheduler, "config", {}).get("use_dynamic_shifting", False)
    try:
        tried = twin(scheduler)
        tried.set_timesteps(8, **({"mu": 1.0} if shifting else {}))
        if hasattr(tried, "scale_model_input"):
            tried.scale_model_input(torch.zeros(1), tried.timesteps[0])  # or `step` warns
        return judge(tried, *schedule_of(tried))
    except Exception:  # of any make, and raises what it likes: the first loop will tell
        return None


def _generators(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's own generators that a step on this device may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
