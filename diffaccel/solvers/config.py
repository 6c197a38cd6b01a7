"""The lever: Adams' methods in the place of a pipeline's scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from ..core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ..core.options import GOT, Check, above, is_number, one_of, plain, refuse, short, take
from ..core.run import Run
from ..core.sampling import FLOW, prediction_of
from ..core.state import PerRun
from ..core.wrappers import shard_group
from ..errors import InvalidOptionError, nearest
from .adams import Adams
from .arrays import Arrays
from .control import TOLERANCE, Control
from .levels import why_never
from .sampler import Rest, Rules, Solver

if TYPE_CHECKING:
    from ..core.protocols import Scheduler

AUTO = "auto"
GRIDS = ("scheduler", "adaptive")
SWITCH = Check("'auto', True or False", lambda value: value == AUTO or isinstance(value, bool))
LEVELS = "'scheduler', 'adaptive', or noise levels that fall, from above 0"


@dataclass(frozen=True)
class AbmSolver:
    """Variable-step Adams-Bashforth-Moulton in (noise level, slope), in the place of the scheduler's steps.

    `num_inference_steps` is the number of evaluations, as ever. Scheduler, config and timesteps stay the pipeline's.
    Mathematics: `solvers.adams`.

    Attributes:
        order: of the predictor, 1 (Euler) to 3, or "auto": by hindsight, for each sample.
        corrector: correct each step once the slope at its end is known: True, False, or "auto": by hindsight.
        grid: "scheduler": its own noise levels. "adaptive": chosen as the run goes, to `tolerance`; the pipeline's
            number of steps is the most evaluations, and steps left over make no model call. Or noise levels, largest
            first, in the scheduler's measure (sigma), as they are to be met: no shift is laid over them. Another
            number of them than the pipeline has steps is interpolated.
        tolerance: of grid="adaptive": what the run may miss by, about, relative to the model's own scale.
    """

    order: int | str = AUTO
    corrector: bool | str = AUTO
    grid: str | tuple[float, ...] = "scheduler"
    tolerance: float = TOLERANCE

    name: ClassVar[str] = "solver.abm"
    slot: ClassVar[Slot] = Slot.CALL
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __post_init__(self) -> None:
        take(self, one_of(AUTO, 1, 2, 3), "order", form=GOT)
        take(self, SWITCH, "corrector", form=GOT)
        take(self, above(0, words="a number above 0"), "tolerance", form=GOT)
        object.__setattr__(self, "grid", _grid(plain(self.grid)))  # it is frozen
        if self.tolerance != TOLERANCE and self.grid != "adaptive":
            raise InvalidOptionError(f"tolerance={self.tolerance:g} sets nothing here: it is for grid='adaptive'")

    def check(self, target: Target) -> Verdict:
        """Needs a scheduler whose steps follow an ODE."""
        pipe, spec = target.pipe, target.spec
        scheduler = getattr(pipe, "scheduler", None)
        if scheduler is None or not hasattr(scheduler, "step"):
            return Verdict.no(f"{type(pipe).__name__} has no scheduler whose steps could be taken")
        if not spec.denoisers:
            return Verdict.no(f"{spec.family}: {spec.no_stack}")
        reason = why_never(scheduler)
        if reason is None and self.grid != "scheduler":
            reason = Arrays.why_never(scheduler) or self._too_noisy(scheduler)
        return Verdict.no(reason) if reason is not None else Verdict.yes(self._in_words(type(scheduler).__name__))

    def _too_noisy(self, scheduler: Scheduler) -> str | None:
        """A flow model has no more than all noise: levels above 1 are of another measure, and give no picture."""
        if isinstance(self.grid, str) or self.grid[0] <= 1 or prediction_of(scheduler) != FLOW:
            return None
        return f"grid begins at {self.grid[0]:g}: noise levels of a flow model are at most 1"

    def _in_words(self, scheduler: str) -> str:
        order = "order by hindsight" if self.order == AUTO else f"order {self.order}"
        if self.grid == "adaptive":
            grid = f"noise levels chosen to a tolerance of {self.tolerance:g}, at most as many as the call has steps"
        else:
            grid = f"on the noise levels of {scheduler}" if self.grid == "scheduler" else f"on {len(self.grid)} levels"
        return f"Adams' method in the place of {scheduler}'s step, {order}, {grid}; another picture than plain's"

    def predict(self, target: Target) -> Mapping[str, object]:
        """Fewer steps are the gain, and the call says how many it takes."""
        return {"origin": "unmeasured"}

    def rules(self) -> Rules:
        """What a run is solved by."""
        order = None if self.order == AUTO else int(self.order)
        corrector = self.corrector if isinstance(self.corrector, bool) else None
        levels = None if isinstance(self.grid, str) else self.grid
        control = Control(float(self.tolerance)) if self.grid == "adaptive" else None
        return Rules(Adams(order, corrector), levels, control)

    def attach(self, target: Target, site: Site) -> Edit:
        """Stand around the steps of each run; with levels that may end early, around the denoisers' calls too."""
        rules, rest = self.rules(), Rest(self.name)
        if rules.control is not None and site.roots:
            main = getattr(target.pipe, next(iter(site.roots)))
            rules = replace(rules, process_group=shard_group(main))
        stops = [root.add(rest, site.rank) for root in site.roots.values()] if rules.control is not None else []

        def begin_run(run: Run) -> None:
            run.state[self.name] = PerRun()
            run.sampler = Solver(self.name, rules)

        def undo() -> None:
            for stop in reversed(stops):
                stop()

        def stats(run: Run) -> Mapping[str, object]:
            return run.sampler.stats(run) if isinstance(run.sampler, Solver) else {}

        return Edit(self.name, undo, begin_run=begin_run, stats=stats)


def _grid(given: object) -> str | tuple[float, ...]:
    """A word, or levels without the 0 that ends them all."""
    if isinstance(given, str):
        if given not in GRIDS:
            raise InvalidOptionError(f"grid={short(given)}: {nearest(given, GRIDS)}, or a list of noise levels")
        return given
    if not isinstance(given, (list, tuple)) or len(given) < 2 or not all(map(is_number, given)):
        raise refuse("grid", given, LEVELS, GOT)
    levels = tuple(map(float, given[:-1] if given[-1] == 0 else given))
    if any(b >= a for a, b in pairwise(levels)) or levels[-1] <= 0:
        raise refuse("grid", given, LEVELS, GOT)
    return levels
