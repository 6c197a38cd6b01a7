"""Correction for caches whose steps are chosen elsewhere, under schedulers that are not Euler's.

An Euler step adds its output to the latents, so what forecasts missed can be added to the next computed output
(`extrapolation.correction`). Other deterministic samplers (UniPC, DPM++ 2M, DDIM) are sent back instead: at a computed
step they take the skipped ones again with interpolated outputs, as step control has it (`steering`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.clock import euler_lengths
from ..core.listener import Sampler
from ..core.sampling import argument, changed, noisy, sample_of
from ..core.state import PerRun
from ..extrapolation.forecast import Sample
from ..extrapolation.hindsight import interpolated
from ..extrapolation.step_control import DEPTH
from .levels import why_not
from .replay import Trail, replay

if TYPE_CHECKING:
    from ..core.run import Run
    from ..core.sampling import StepCall


class Followed(NamedTuple):
    """Where a loop stands.

    Attributes:
        loop: which.
        acts: whether its sampler is sent back; not under Euler, where the cache itself corrects.
        who: denoisers and branches that the outputs were made of; others begin anew.
        history: outputs of computed steps, oldest first.
        trail: the steps skipped since.
    """

    loop: int
    acts: bool
    who: tuple[tuple[str, str], ...] = ()
    history: tuple[Sample, ...] = ()
    trail: Trail = Trail()


@dataclass(frozen=True)
class Follower(Sampler):
    """The sampler's listener of one run (`Run.sampler`): it decides nothing.

    Attributes:
        name: the lever's.
        order: of the interpolation, 1 to 3.
        coordinate: "step", "timestep" or "sigma": the axis of the cache's forecasts.
    """

    name: str
    order: int
    coordinate: str

    def step(self, run: Run, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands around `scheduler.step`."""
        calls = [call for call in run.calls[-run.calls_in_step :] if call.loop == run.loop and call.step == run.step]
        state = self._state(run, kwargs)
        if not state.acts or not calls or run.scheduler is None:
            return step(*args, **kwargs)
        call: StepCall = (args, kwargs)
        output: torch.Tensor = argument(call, 0, "model_output")
        sample: torch.Tensor = argument(call, 2, "sample")
        who = tuple([(c.component, c.name) for c in calls])
        if state.who != who or (state.history and state.history[-1].values[0].shape != output.shape):
            state = Followed(run.loop, True, who)
        trail = state.trail.seen(sample)
        if any(c.by == self.name for c in calls):
            trail = trail.then(run.scheduler, run.step, call)
            made = step(*args, **kwargs)
            self._keep(run, state._replace(trail=trail.returned(sample_of(made))))
            return made
        now = Sample(self._at(run, run.step), (output,))
        if trail.steps and state.history and not trail.lost:
            better = [interpolated(state.history, now, self.order, self._at(run, s.index)) for s in trail.steps]
            given = replay(run.scheduler, step, trail, better).to(sample.dtype)
            call = changed(call, output, given)
        self._keep(run, state._replace(history=(*state.history, now)[-DEPTH:], trail=Trail()))
        return step(*call[0], **call[1])

    def _state(self, run: Run, kwargs: dict[str, Any]) -> Followed:
        held = run.state.setdefault(f"{self.name}.follow", PerRun())
        state = held.get("at")
        if not isinstance(state, Followed) or state.loop != run.loop:
            euler = euler_lengths(run.scheduler, run.schedule()[1]) is not None
            reason = None if euler else why_not(run)
            state = Followed(run.loop, not euler and reason is None)
            if reason is not None:
                run.note(f"{self.name} left out its correction: {reason}")
        if state.acts and noisy(kwargs):
            run.note(f"{self.name} left out its correction: the pipeline asks its scheduler for fresh noise")
            state = Followed(run.loop, False)
        held["at"] = state
        return state

    def _keep(self, run: Run, state: Followed) -> None:
        run.state[f"{self.name}.follow"]["at"] = state
        tensors = [s.values[0] for s in state.history] + [
            argument(s.call, 0, "model_output") for s in state.trail.steps
        ]
        run.hold(f"{self.name}.follow", sum(t.numel() * t.element_size() for t in tensors))

    def _at(self, run: Run, step: int) -> float:
        if self.coordinate == "step":
            return float(step)
        timesteps, sigmas = run.schedule()
        return float((timesteps if self.coordinate == "timestep" else sigmas)[step])
