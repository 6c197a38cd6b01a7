"""A solver at work in one run: it stands around `scheduler.step`, and takes each step in the scheduler's place.

It sees what the pipeline made of its branches, so that guidance of any kind is in it already, and the latents as the
pipeline hands them over, so that whatever a callback or an inpainting blend did to them is kept. The scheduler's own
`step` runs as well, for its counters and the form of its answer; the latents in that answer are the solver's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.listener import Listener, Sampler
from ..core.sampling import argument, noisy, sample_of
from ..core.state import PerRun
from .adams import Adams, Course, Node, misses
from .arrays import Arrays
from .control import Control, Pace
from .levels import Ode, ode_of, why_not

if TYPE_CHECKING:
    from ..core.compat import Args, Forward, Kwargs, Output
    from ..core.run import Call, Run
    from ..core.sampling import StepCall


@dataclass(frozen=True)
class Rules:
    """What a run is solved by.

    Attributes:
        adams: order and corrector.
        levels: the user's own noise levels, for `set_timesteps` to be overwritten with; None: the scheduler's.
        control: chooses the levels as the run goes; None: they stay.
        process_group: members that must choose alike, as they gather one model's shards; None: this one alone.
    """

    adams: Adams
    levels: tuple[float, ...] | None = None
    control: Control | None = None
    process_group: Any = None


class Stand(NamedTuple):
    """Where a loop stands. Replaced, never written into.

    Attributes:
        loop: which.
        ode: of the loop, with the noise levels as they are by now; None: the scheduler takes the steps itself.
        who: the calls (component, branch) whose outputs the course knows; begun anew when they change.
        course: what is known of the loop, and what the last step did.
        pace: how the next level is chosen.
        ended: the step from which on nothing is left to do, where the solver came to the end early.
        done: evaluations.
        orders, corrections: what was decided, per evaluation, [B] on the device.
    """

    loop: int
    ode: Ode | None
    who: tuple[tuple[str, str], ...] = ()
    course: Course = Course()
    pace: Pace = Pace()
    ended: int | None = None
    done: int = 0
    orders: tuple[torch.Tensor, ...] = ()
    corrections: tuple[torch.Tensor, ...] = ()


class Solver(Sampler):
    """The sampler's listener of one run (`Run.sampler`). What it remembers lies in `run.state`."""

    def __init__(self, name: str, rules: Rules) -> None:
        self.name, self.rules = name, rules

    # ---- the loop ----------------------------------------------------------------------------------------

    def begin_loop(self, run: Run) -> None:
        """`set_timesteps` returned: put the user's own levels in, before the pipeline looks."""
        if self.rules.levels is not None and run.scheduler is not None:
            note = Arrays(run.scheduler).fill(self.rules.levels)
            if note is not None:
                run.note(f"{self.name}: {note}")

    def stand(self, run: Run) -> Stand:
        """Where the loop in progress stands."""
        known = run.state.setdefault(self.name, PerRun()).get("at")
        if isinstance(known, Stand) and known.loop == run.loop:
            return known
        reason, ode = self._why_not(run)
        if reason is not None:
            run.note(f"{self.name} stood down: {reason}")
        found = Stand(run.loop, ode, done=known.done if isinstance(known, Stand) else 0)
        self._keep(run, found)
        return found

    def _why_not(self, run: Run) -> tuple[str | None, Ode | None]:
        scheduler = run.scheduler
        if scheduler is None:
            return "the pipeline has no scheduler", None
        timesteps, sigmas = run.schedule()
        timesteps = timesteps[: run.total]
        if not timesteps:
            return f"{type(scheduler).__name__} gives no timesteps before the loop", None
        try:
            reason = why_not(scheduler, timesteps, sigmas)
        except Exception as error:  # whatever a scheduler of somebody else's raises
            reason = f"{type(scheduler).__name__} could not be tried beforehand ({type(error).__name__})"
        return reason, None if reason is not None else ode_of(scheduler, timesteps, sigmas)

    def _keep(self, run: Run, stand: Stand) -> None:
        run.state.setdefault(self.name, PerRun())["at"] = stand
        held = [node.slope for node in stand.course.nodes]
        held += [t for t in (stand.course.moved, stand.course.added) if t is not None]
        run.hold(self.name, sum(t.numel() * t.element_size() for t in held))

    # ---- a step ------------------------------------------------------------------------------------------

    def step(self, run: Run, step: Forward, args: Args, kwargs: Kwargs) -> Output:
        """Instead of `scheduler.step(*args, **kwargs)`."""
        call: StepCall = (args, kwargs)
        stand = self.stand(run)
        if stand.ode is None or run.step >= len(stand.ode.at) - 1:
            return step(*args, **kwargs)
        if stand.ended is not None and run.step >= stand.ended:
            return self._rest(run, call)
        if noisy(kwargs) or kwargs.get("per_token_timesteps") is not None:
            run.note(f"{self.name} stood down: the pipeline asks for noise or for timesteps of each token")
            self._keep(run, stand._replace(ode=None, course=Course()))
            return step(*args, **kwargs)
        made = step(*args, **kwargs)
        return with_sample(made, self._solve(run, stand, stand.ode, call, sample_of(made)))

    def _solve(self, run: Run, stand: Stand, ode: Ode, call: StepCall, plain: torch.Tensor) -> torch.Tensor:
        """The latents at the next noise level, in the form of the scheduler's own."""
        index, at = run.step, ode.at[run.step]
        output, sample = argument(call, 0, "model_output"), argument(call, 2, "sample")
        x = sample.float() * ode.scale(at)
        calls = run.calls[-run.calls_in_step :] if run.calls_in_step else []
        who = tuple([(one.component, one.branch) for one in calls])
        course = stand.course if who == stand.who else Course()
        now = Node(at, ode.slope(output, x, at))
        found = misses(course.nodes, now)
        stand = self._choose(run, stand, ode, found)
        assert stand.ode is not None
        end = stand.ode.at[index + 1]
        course = self.rules.adams.advance(course, now, found, end, end == stand.ode.at[-1])
        assert course.added is not None and course.degrees is not None
        corrected = () if course.corrected is None else (course.corrected,)
        stand = stand._replace(
            who=who,
            course=course._replace(added=None),
            done=stand.done + 1,
            orders=(*stand.orders, course.degrees + 1),
            corrections=(*stand.corrections, *corrected),
        )
        self._keep(run, stand)
        made: torch.Tensor = (x + course.added) / ode.scale(end)
        return made.to(plain.dtype)

    def _choose(self, run: Run, stand: Stand, ode: Ode, found: torch.Tensor) -> Stand:
        """With an adaptive grid: the next noise level, written where the loop will look for it."""
        control, index = self.rules.control, run.step
        if control is None or run.scheduler is None:
            return stand
        if run.copies:
            run.note(
                f"{self.name}: the pipeline copied its scheduler for a stream of its own (sound, say), which goes by "
                "the levels it was given: they are kept"
            )
            return stand
        arrays = Arrays(run.scheduler)
        worst = torch.nan_to_num(found, nan=1.0).amax(1)
        if self.rules.process_group is not None and len(worst):
            torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX, group=self.rules.process_group)
        seen = worst.tolist()  # the one wait for the device
        pace, levels = control.choose(stand.pace, ode, index, seen, arrays.nearest)
        arrays.write(levels, run.begin + index + 1)
        at = (*ode.at[: index + 1], *levels)
        ended = next((i for i in range(index + 1, len(at) - 1) if at[i] == at[-1]), None)
        return stand._replace(ode=ode._replace(at=at), pace=pace, ended=ended)

    def _rest(self, run: Run, call: StepCall) -> Output:
        """A step of which nothing is left: the latents stay, the scheduler counts on."""
        scheduler: Any = run.scheduler
        if isinstance(getattr(scheduler, "_step_index", None), int):
            scheduler._step_index += 1
        return with_sample(run.step_output, argument(call, 2, "sample"))

    # ---- the report --------------------------------------------------------------------------------------

    def stats(self, run: Run) -> dict[str, object]:
        """How many evaluations, and what was decided: the mean order, and the share of steps that were corrected."""
        stand = run.state.get(self.name, PerRun()).get("at")
        if not isinstance(stand, Stand) or not stand.orders:
            return {"evaluations": 0}
        orders = torch.cat(stand.orders).float()
        fixed = torch.cat(stand.corrections).float() if stand.corrections else orders.new_zeros(1)
        found = {"evaluations": stand.done, "iterations": run.ticks}
        return {**found, "order": round(float(orders.mean()), 2), "corrected": round(float(fixed.mean()), 2)}


def with_sample(output: Output, sample: torch.Tensor) -> Output:
    """What `scheduler.step` returned, with other latents."""
    if isinstance(output, tuple):
        return (sample, *output[1:])
    return replace(output, prev_sample=sample)


class Rest(Listener):
    """Answers the denoiser's calls once the solver has come to the end: nothing is computed any more."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _over(self, run: Run, step: int) -> bool:
        stand = run.state.get(self.name, PerRun()).get("at")
        return isinstance(stand, Stand) and stand.loop == run.loop and stand.ended is not None and step >= stand.ended

    def begin_call(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """The denoiser is about to run; what it said last stands for what nobody looks at."""
        if call.answer is None and self._over(call.run, call.step):
            known = call.run.outputs.get((call.component, call.branch))
            if known is not None:
                call.answer, call.computed, call.by = known, False, self.name

    def will_compute(self, run: Run, step: int, component: str, branch: str) -> bool | None:
        """Not once the end is reached; with an adaptive grid only the call can tell."""
        return not self._over(run, step)
