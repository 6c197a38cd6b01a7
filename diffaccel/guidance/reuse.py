"""Guidance reuse: keep the difference of the two guidance branches, and skip the unconditional one on chosen steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ..core.compat import native_cache
from ..core.modular import guiders, has_second_branch
from ..core.options import GOT, LIMIT, NUMBER, one_of, plain, refuse, take, whole
from ..core.run import Run
from ..core.state import PerRun
from ..errors import IncompatibleError, InvalidOptionError
from ..extrapolation.forecast import Forecast
from ..extrapolation.schedule import check_form, parse_schedule
from ..models.registry import CARDS
from ..models.spec import EMBEDDED
from .difference import BranchAction, GuidanceSteps
from .listener import GuidanceListener, sum_done

COORDINATES = ("step", "sigma")


@dataclass(frozen=True)
class GuidanceReuse:
    """Run both guidance branches on some steps only; on the others the stored difference stands for the second one.

    With outputs c (conditional) and u (unconditional), d = c - u is stored where both are run; elsewhere
    u := c - d. Pipelines that run the branches in two calls skip the second; where one batch holds both, only the
    conditional half is run. Source: CFG-Cache of FasterCache (arXiv 2410.19355), without its split into frequencies.

    Outside of the guidance interval (`start`, `end`, or `sigma_low`, `sigma_high`) u := c, so the result is c alone.
    Source: arXiv 2404.07724.

    Attributes:
        interval: both branches are run every so many steps; 1 runs them in every step.
        order: 0 takes the newest difference as it is; 1 and 2 extrapolate over the last two or three of them.
        start, end: shares of the loop between which there is guidance; outside, its branch is never run.
        first_steps, last_steps: so many steps at the start and at the end run both branches.
        min_steps: runs of fewer steps are computed in full, with guidance in every step.
        schedule: the steps that run both branches, in place of `interval`: "1101...", flags, or step indices
            (see `extrapolation.schedule.parse_schedule`).
        sigma_low, sigma_high: noise levels between which there is guidance (low < sigma <= high), in the scheduler's
            own measure.
        coordinate: along which differences are extrapolated, "step" or "sigma".
    """

    interval: int = 2
    order: int = 0
    start: float = 0.0
    end: float = 1.0
    first_steps: int = 2
    last_steps: int = 1
    min_steps: int = 9
    schedule: str | tuple[int, ...] | None = None
    sigma_low: float | None = None
    sigma_high: float | None = None
    coordinate: str = "step"

    name: ClassVar[str] = "guidance.reuse"
    slot: ClassVar[Slot] = Slot.CALL
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __post_init__(self) -> None:
        take(self, whole(1), "interval", form=GOT)
        take(self, whole(0), "first_steps", "last_steps", "min_steps", form=GOT)
        take(self, one_of(0, 1, 2), "order", form=GOT)
        if self.coordinate not in COORDINATES:
            raise InvalidOptionError(f"coordinate must be one of {', '.join(COORDINATES)}, got {self.coordinate!r}")
        take(self, NUMBER, "start", "end", form=GOT)
        take(self, LIMIT.or_none(), "sigma_low", "sigma_high", form=GOT)
        if not 0 <= self.start <= self.end <= 1:
            raise InvalidOptionError(f"0 <= start <= end <= 1 is needed, got start={self.start}, end={self.end}")
        if self.sigma_low is not None and self.sigma_high is not None and self.sigma_low > self.sigma_high:
            raise InvalidOptionError(f"sigma_low={self.sigma_low} is above sigma_high={self.sigma_high}")
        self._check_schedule()

    def _check_schedule(self) -> None:
        given = plain(self.schedule)
        if given is None:
            return
        listed = isinstance(given, (list, tuple)) and given and all(isinstance(step, int) for step in given)
        if not listed and not isinstance(given, str):
            raise refuse("schedule", given, "a string of 0 and 1, or a list of flags or of steps", GOT)
        check_form(given)
        object.__setattr__(self, "schedule", given if isinstance(given, str) else tuple(given))  # it is frozen

    @property
    def neutral(self) -> bool:
        """Does every step run both branches?"""
        always = self.interval == 1 and self.schedule is None
        return always and self.start == 0 and self.end == 1 and self.sigma_low is None and self.sigma_high is None

    # ---- the plan --------------------------------------------------------------------------------------

    def check(self, target: Target) -> Verdict:
        """Needs a model whose guidance branches are known, and a pipeline that has a second one."""
        spec, pipe = target.spec, target.pipe
        if spec.family not in CARDS and not guiders(pipe):  # guiders name the branches themselves
            return Verdict.no(
                f"{spec.family}: without a card it is not known which of a step's calls is the unconditional one"
            )
        kind = type(pipe).__name__
        if not has_second_branch(pipe):
            return Verdict.no(f"{kind} takes no negative prompt: it has no unconditional branch that could be skipped")
        for component in spec.denoisers:
            module = getattr(pipe, component, None)
            other = None if module is None else native_cache(module)
            if other is not None:
                return Verdict.refuse(
                    f"diffusers' own cache ({other}) is on {component} and counts calls that would be skipped: call "
                    f"pipe.{component}.disable_cache() first",
                    IncompatibleError,
                )
        if self.neutral:
            return Verdict.yes("interval 1 and guidance throughout: every step runs both branches")
        when = "; acts where a call asks for true guidance (a negative prompt)" if spec.guidance == EMBEDDED else ""
        down = f"; runs of fewer than {self.min_steps} steps are computed in full" if self.min_steps else ""
        return Verdict.yes(f"{self._in_words()}{when}{down}")

    def _in_words(self) -> str:
        if self.schedule is not None:
            words = "the unconditional branch is run on the steps of the schedule"
        elif self.interval == 1:
            words = "the unconditional branch is run in every step"
        else:
            words = f"the unconditional branch is run on one step of {self.interval}"
        if self.start > 0 or self.end < 1:
            words += f", within {self.start:g} to {self.end:g} of the loop"
        if self.sigma_low is not None or self.sigma_high is not None:
            low, high = 0.0 if self.sigma_low is None else self.sigma_low, self.sigma_high
            words += f", for noise levels above {low:g}" + ("" if high is None else f" up to {high:g}")
        return words

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Share of the unconditional branch, and of all denoiser work, that a long guided loop leaves out."""
        run = 1 / self.interval
        if isinstance(self.schedule, str):
            flags = self.schedule.replace(" ", "").replace("_", "")
            run = flags.count("1") / len(flags)
        elif self.schedule is not None:
            return {"origin": "unmeasured"}
        skipped = 1 - run * (self.end - self.start)
        return {
            "unconditional_skipped": round(skipped, 3),
            "denoiser_work_skipped": round(skipped / 2, 3),
            "origin": "computed",
        }

    # ---- a run -----------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """How a difference is guessed."""
        return Forecast(self.order, coordinate=self.coordinate)

    def coordinate_of(self, run: Run, step: int) -> float:
        """Where a step lies on the axis of extrapolation."""
        return run.schedule()[1][step] if self.coordinate == "sigma" and self.order else float(step)

    def steps(self, run: Run, module: Any) -> GuidanceSteps | None:
        """The steps of the loop that begins; None, with a note, where the lever must sit out."""
        total, mask, reason = run.total, None, self._why_not(run, module)
        if reason is None and self.schedule is not None and total is not None:
            try:
                mask = parse_schedule(self.schedule, total)
            except InvalidOptionError as error:
                reason = str(error)
        if reason is not None:
            run.note(f"{self.name} stood down: {reason}")
            return None
        bounds = self.sigma_low is not None or self.sigma_high is not None
        return GuidanceSteps(
            total, self.interval, mask, self.first_steps, self.last_steps, self.start, self.end, self.sigma_low,
            self.sigma_high, run.schedule()[1] if bounds else (),
        )  # fmt: skip

    def _why_not(self, run: Run, module: Any) -> str | None:
        """Host data only, unless noise levels are asked for (read once per loop)."""
        bounds = self.sigma_low is not None or self.sigma_high is not None
        needs = {"min_steps": self.min_steps, "last_steps": self.last_steps, "schedule": self.schedule is not None}
        needs |= {"start": self.start > 0, "end": self.end < 1}
        if run.total is None and any(needs.values()):
            names = " and ".join(name for name, needed in needs.items() if needed)
            return f"the number of steps is unknown, so {names} cannot be kept"
        if run.total is not None and run.total < self.min_steps:
            return f"the run has {run.total} steps, fewer than min_steps={self.min_steps}"
        if getattr(run.scheduler, "order", 1) > 1:
            kind = type(run.scheduler).__name__
            return f"{kind} calls the denoiser more than once per step, so differences would mix its stages"
        if torch.is_grad_enabled():
            return "gradients are enabled (wrap the loop in torch.no_grad())"
        if getattr(module, "_cache_config", None) is not None:
            return "diffusers' own cache is on, and counts calls that would be skipped"
        if getattr(run.pipe, "do_perturbed_attention_guidance", False):
            return "perturbed-attention guidance adds a branch to the batch"
        wanted = bounds or (self.coordinate == "sigma" and self.order)
        if wanted and (run.total is None or len(run.schedule()[1]) < run.total):
            return "noise levels are needed, and this scheduler gives none (or none for every step)"
        return None

    def attach(self, target: Target, site: Site) -> Edit:
        """Listen to the calls of every denoiser; at the neutral setting to none."""
        listeners = [
            GuidanceListener(self, root, getattr(target.pipe, component), target.spec, site.rank)
            for component, root in ({} if self.neutral else site.roots).items()
        ]

        def begin_run(run: Run) -> None:
            run.state[self.name] = PerRun()

        def end_run(run: Run) -> None:
            for listener in listeners:
                listener.end_run()
            guided = self.neutral or sum_done(run.state.get(self.name, PerRun()))
            if run.ticks and not guided and not any(note.startswith(f"{self.name} stood down") for note in run.notes):
                run.note(f"{self.name} stood down: this call ran without an unconditional branch")

        def undo() -> None:
            for listener in reversed(listeners):
                listener.undo()

        def stats(run: Run) -> dict[str, Any]:
            done = sum_done(run.state.get(self.name, PerRun()))
            return {f"steps_{act.value}": done.get(act, 0) for act in BranchAction}

        return Edit(
            self.name,
            undo,
            begin_run=begin_run,
            end_run=end_run,
            bytes_held=lambda run: sum(listener.bytes_held() for listener in listeners),
            stats=stats,
        )
