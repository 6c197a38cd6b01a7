"""Step control at work in one run: it sees every `scheduler.step`, says which step is computed next, gives skipped
steps their forecasts, and sends the sampler back through them once the next output is known.

All of it happens at the sampler, on what the pipeline made of its branches: guidance of any kind is in it already,
whether the branches were called one by one or as one batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.compat import leaves
from ..core.listener import Sampler
from ..core.sampling import argument, changed, noisy, sample_of, state_of
from ..core.state import PerRun
from ..extrapolation.forecast import Sample
from ..extrapolation.hindsight import Gram, forecast, interpolated
from ..extrapolation.hindsight import misses as misses_of
from ..extrapolation.step_control import Levels, StepControl, Track
from .fidelity import TABLE, Fit
from .grouped import GroupedPolicy
from .levels import levels_of, why_not
from .policy import Memory, Policy
from .replay import Trail, replay, rows_put

if TYPE_CHECKING:
    from ..core.run import Call, Run
    from ..core.sampling import StepCall

NOISE = {torch.bfloat16: 3e-3, torch.float16: 4e-4}  # relative rounding error of a model's output, measured
ALL = slice(None)


@dataclass(frozen=True)
class StepRules:
    """How a run is controlled.

    Attributes:
        tolerance, order, max_gap, max_steps: see `StepControl`.
        correct: order with which skipped steps are interpolated afterwards, 0: not at all; None: one above that of
            the forecasts they took, at most 2, and not where these missed too much (`StepControl.torn`).
        fit: how prices go with PSNR, for the report and for `min_psnr_db`.
        min_psnr_db: the tolerance follows from this, and is kept for what gaps really cost; None: it does not.
        max_seconds: of the loop: turned into computed steps once it is known what one takes; None: no limit.
        per_sample: every sample of a batch has a track of its own.
        process_group: members that must decide alike.
    """

    tolerance: float
    order: int | None = None
    correct: int | None = None
    max_gap: int | None = None
    max_steps: int | None = None
    fit: Fit = TABLE
    min_psnr_db: float | None = None
    max_seconds: float | None = None
    per_sample: bool = False
    process_group: Any = None

    def controller(self, name: str) -> Controller:
        """Whom a run has that is led by these rules; `name` is the lever's."""
        return Controller(name, self)


# Of a denoiser's call: component, branch as the pipeline names it, number of the conditions it was told, rows.
Who = tuple[str, str, int, int]


class Steering(NamedTuple):
    """Where a loop stands; one track and one trail for the batch, or one for each of its samples.

    Attributes:
        loop: which.
        who: the calls whose outputs, put together by the pipeline, the tracks hold; begun anew when they change.
        form: shape of what the pipeline makes of them.
        noise: relative rounding error of the denoiser's outputs.
        tracks, trails: see there.
    """

    loop: int
    who: tuple[Who, ...] = ()
    form: torch.Size = torch.Size()
    noise: float = 0.0
    tracks: tuple[Track, ...] = ()
    trails: tuple[Trail, ...] = ()


class Controller(Sampler):
    """The sampler's listener of one run (`Run.sampler`). What it remembers lies in `run.state`."""

    def __init__(self, name: str, rules: StepRules) -> None:
        self.name, self.key, self.rules = name, f"{name}.steps", rules
        self.levels: Levels | None = None
        self.asked: int | None = None  # the loop that `reason` is about
        self.reason: str | None = None
        self.met: dict[tuple[str, str], tuple[int, int]] = {}  # what ends the `Who` of each call
        self.hits: tuple[bool, ...] = ()  # at a step in progress: which samples are reused, guards heard
        self.most = rules.max_steps  # computed steps of the loop
        self.began, self.ticks, self.pace = time.perf_counter(), 0.0, math.inf
        self.prices: list[float | None] = []  # of the pictures, as far as the loop has come

    # ---- what the cache asks -----------------------------------------------------------------------------

    def why_not(self, run: Run) -> str | None:
        """Why the loop that begins is computed in full, or None. Found once per loop; a resumed run knows it."""
        if self.asked != run.loop:
            state = run.state.setdefault(self.key, PerRun())
            known = state.get("why")
            if known is None or known[0] != run.loop:
                known = state["why"] = (run.loop, why_not(run))
            self.levels = None
            self.asked, self.reason = known
            if self.reason is None and run.scheduler is not None:
                timesteps, sigmas = run.schedule()
                self.levels = levels_of(run.scheduler, timesteps[: run.total], sigmas)
        return self.reason

    def _steering(self, run: Run) -> Steering | None:
        state = run.state.get(self.key, PerRun()).get("at")
        return state if isinstance(state, Steering) and state.loop == run.loop else None

    def _who(self, state: Steering | None, call: Call) -> Who:
        """Who calls; one that others answered is taken for whom it was before."""
        key = call.component, call.name
        known = self.met.get(key)
        if known is None:
            earlier = () if state is None else state.who
            known = next(((told, rows) for *whose, told, rows in earlier if (*whose,) == key), (0, 0))
        return (*key, *known)

    def reuses(self, call: Call, rows: int, told: int) -> list[bool]:
        """Which of the `rows` of a call's batch are to be reused. `told`: see `Who`."""
        state = self._steering(call.run)
        given = rows if call.inputs is None else self._who(state, call)[-1] or rows  # others may have halved it
        self.met[call.component, call.name] = told, given
        if state is None or not state.tracks or (call.component, call.name, told, given) not in state.who:
            return [False] * rows
        ahead = [call.step < track.upto for track in state.tracks]
        return ahead * (rows // len(ahead)) if rows % len(ahead) == 0 else [all(ahead)] * rows

    def hear(self, policy: Policy | GroupedPolicy, memory: Memory) -> None:
        """What the guards made of that; of samples that decide for themselves."""
        self.hits = policy.verdicts(memory) if isinstance(policy, GroupedPolicy) else ()

    def will_compute(self, run: Run, step: int) -> bool | None:
        """Is that step computed? None where it is not decided yet."""
        state = self._steering(run)
        if state is None or not state.tracks:
            return True if step <= 1 else None
        ahead = [step < track.upto for track in state.tracks]
        if all(ahead):
            return False
        return True if run.step <= step and min(track.upto for track in state.tracks) == step else None

    # ---- the sampler's step --------------------------------------------------------------------------------

    def step(self, run: Run, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands around `scheduler.step`."""
        calls = [call for call in run.calls[-run.calls_in_step :] if call.loop == run.loop and call.step == run.step]
        if not calls or self.asked != run.loop or self.levels is None or run.step >= len(self.levels.at):
            return step(*args, **kwargs)
        call: StepCall = (args, kwargs)
        if noisy(kwargs):
            self._stand_down(run, "the pipeline asks its scheduler for fresh noise (eta, s_churn)")
            return step(*args, **kwargs)
        state = self._steering(run)
        who = tuple([self._who(state, c) for c in calls])
        reused = any([c.by == self.name for c in calls])
        if state is None or state.who != who or state.form != argument(call, 0, "model_output").shape:
            return self._begin(run, step, call, () if reused else who)
        return self._go_on(run, step, call, calls, state, reused)

    def _stand_down(self, run: Run, reason: str) -> None:
        self.levels, self.reason = None, reason
        run.state[self.key] = PerRun(why=(run.loop, reason))
        run.hold(self.key, 0)
        run.note(f"{self.name} stood down: {reason}")

    def _rows(self, output: torch.Tensor) -> list[slice]:
        return [slice(r, r + 1) for r in range(len(output))] if self.rules.per_sample else [ALL]

    def _control(self, noise: float) -> StepControl:
        rules = self.rules
        kept = rules.min_psnr_db is not None
        tolerance = rules.fit.tolerance(rules.min_psnr_db) if rules.min_psnr_db is not None else rules.tolerance
        return StepControl(tolerance, rules.order, rules.max_gap, noise, self.most, kept)

    def _begin(self, run: Run, step: Callable[..., Any], call: StepCall, who: tuple[Who, ...]) -> Any:
        """A loop, an expert or another set of branches begins: nothing known before says anything about it.

        `who` is empty where some branches were reused: the output is used and not remembered.
        """
        assert self.levels is not None
        output: torch.Tensor = argument(call, 0, "model_output")
        noise, tracks, before = _noise_of(run, who), [], self._steering(run)
        done = max((track.done for track in before.tracks), default=0) if before is not None else 0
        for rows in self._rows(output):
            now = Sample(self.levels.at[run.step], (output[rows],), None, run.step == 0 and run.begin == 0)
            track = self._control(noise).begin(now, run.step, done)
            tracks.append(track if who else track._replace(history=()))
        self._keep(run, Steering(run.loop, who, output.shape, noise, tuple(tracks), (Trail(),) * len(tracks)))
        return step(*call[0], **call[1])

    def _go_on(
        self, run: Run, step: Callable[..., Any], call: StepCall, calls: list[Call], state: Steering, reused: bool
    ) -> Any:
        levels, scheduler, index = self.levels, run.scheduler, run.step
        assert levels is not None and scheduler is not None
        output: torch.Tensor = argument(call, 0, "model_output")
        sample: torch.Tensor = argument(call, 2, "sample")
        control, places = self._control(state.noise), self._rows(output)
        tracks, trails = list(state.tracks), [trail.seen(sample) for trail in state.trails]
        alone = self.hits if self.rules.per_sample and len(self.hits) == len(tracks) else (False,) * len(tracks)
        skips = [reused or hit for hit in alone]
        given, said = sample, output
        found = self.misses(control, tracks, output, places, skips, index)
        if not all(skips):
            self._watch_time(max(track.done for track in tracks), output.device)
            control = self._control(state.noise)
        for unit, rows in enumerate(places):
            if skips[unit]:
                guess = forecast(tracks[unit].history, tracks[unit].shares, levels.at[index])
                said = _with_rows(said, rows, guess)
                continue
            now = Sample(levels.at[index], (output[rows],))
            if trails[unit].steps and not (self.rules.correct is None and control.torn(tracks[unit], found[unit])):
                given = self._go_back(scheduler, step, trails[unit], tracks[unit], now, rows, given)
            tracks[unit] = control.advance(tracks[unit], now, index, levels, found[unit])
            trails[unit] = Trail()
        call = changed(call, said, given)
        for unit, skip in enumerate(skips):
            if skip:
                trails[unit] = trails[unit].then(scheduler, index, call)
        made = step(*call[0], **call[1])
        for unit, skip in enumerate(skips):
            if skip:
                trails[unit] = trails[unit].returned(sample_of(made))
        known = [track.error for track in tracks if track.error is not None]
        errors = [math.sqrt(gram[0][0]) for grams in found for gram in grams] if all(found) else None
        for one in calls:
            one.gate = max(known, default=None)
            one.error = None if errors is None else torch.tensor(errors)
        self._keep(run, state._replace(tracks=tuple(tracks), trails=tuple(trails)))
        return made

    def _watch_time(self, done: int, device: torch.device) -> None:
        """A step was computed and waited for: how many more fit into `max_seconds`, at what the quickest one took?"""
        if self.rules.max_seconds is None:
            return
        now = time.perf_counter()
        if self.ticks:
            self.pace = min(self.pace, now - self.ticks)
            left = int((self.rules.max_seconds - (now - self.began)) / self.pace)
            fits = done + 1 + max(left, 1)  # the last step is computed in any case
            if self.rules.process_group is not None:  # clocks differ, and decisions must not
                least = torch.tensor(fits, device=device)
                torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=self.rules.process_group)
                fits = int(least)
            self.most = fits if self.rules.max_steps is None else min(fits, self.rules.max_steps)
        self.ticks = now

    def stats(self) -> dict[str, object]:
        """What the pictures' gaps cost, the PSNR to expect and what nine of ten such pictures reach; worst first."""
        prices = sorted((price or 0.0 for price in self.prices), reverse=True)
        fit = self.rules.fit
        return {
            "price": [round(price, 6) for price in prices],
            "estimate_db": [round(fit.estimate_db(price), 1) for price in prices],
            "bound_db": [round(fit.bound_db(price), 1) for price in prices],
        }

    def misses(
        self,
        control: StepControl,
        tracks: Sequence[Track],
        output: torch.Tensor,
        places: Sequence[slice],
        skips: Sequence[bool],
        index: int,
    ) -> list[Sequence[Gram]]:
        """Per unit what its forecasts would have missed; the one wait for the device at a computed step."""
        assert self.levels is not None
        wanted = [unit for unit, skip in enumerate(skips) if not skip and tracks[unit].history]
        found: list[Sequence[Gram]] = [[] for _ in tracks]
        if not wanted:
            return found
        rows = [
            misses_of(tracks[unit].history, Sample(self.levels.at[index], (output[places[unit]],)), control.order)
            for unit in wanted
        ]
        grams: list[list[list[list[float]]]] = torch.stack(rows).tolist()
        if self.rules.process_group is not None:  # every member decides by the samples of all, be they 1 or 8
            group = self.rules.process_group
            everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(everyone, grams, group=group)
            grams = [[gram for member in everyone for gram in member[unit]] for unit in range(len(wanted))]
        for unit, values in zip(wanted, grams, strict=True):
            found[unit] = values
        return found

    def _go_back(
        self,
        scheduler: Any,
        step: Callable[..., Any],
        trail: Trail,
        track: Track,
        now: Sample,
        rows: slice,
        given: torch.Tensor,
    ) -> torch.Tensor:
        """The latents with which this step begins, with the skipped ones interpolated; the scheduler's state fits."""
        order = min(len(track.shares) + 1, 2) if self.rules.correct is None else self.rules.correct
        if not trail.steps or not order or trail.lost:
            return given
        assert self.levels is not None
        outputs = []
        for skipped in trail.steps:
            better = interpolated(track.history, now, order, self.levels.at[skipped.index])
            outputs.append(_with_rows(argument(skipped.call, 0, "model_output"), rows, better))
        live = state_of(scheduler)
        sample = replay(scheduler, step, trail, outputs).to(given.dtype)
        if rows == ALL:
            return sample
        rows_put(scheduler, live, rows, len(given))
        return _with_rows(given, rows, sample[rows])

    def _keep(self, run: Run, state: Steering) -> None:
        run.state.setdefault(self.key, PerRun())["at"] = state
        self.prices = [track.price for track in state.tracks]
        run.hold(self.key, held(state))


def _noise_of(run: Run, who: Sequence[Who]) -> float:
    """Relative rounding error of what the denoiser says, by the dtype in which it says it (pipelines may widen it)."""
    said = [tensor for component, branch, *_ in who for tensor in leaves(run.outputs.get((component, branch)))[0]]
    return max((NOISE.get(tensor.dtype, 0.0) for tensor in said), default=0.0)


def _with_rows(whole: torch.Tensor, rows: slice, part: torch.Tensor) -> torch.Tensor:
    """`whole` with other values in some rows; all of them: the part itself."""
    if rows == ALL:
        return part.to(whole.dtype)
    copy = whole.clone()
    copy[rows] = part.to(whole.dtype)
    return copy


def held(state: Steering) -> int:
    """Bytes of the tensors that a run's control refers to, each storage counted once."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(state):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _tensors(state: Steering) -> list[torch.Tensor]:
    """All of them, in loops that call nothing: this runs at every step."""
    found: list[Any] = []
    for track in state.tracks:
        for sample in track.history:
            found.append(sample.values[0])
    for trail in state.trails:
        for value in trail.state.values():
            found.extend(value if type(value) is list else (value,))
        for skipped in trail.steps:
            found.extend((*skipped.call[0], *skipped.call[1].values(), skipped.edit))
    return [value for value in found if isinstance(value, torch.Tensor)]
