"""What all step caches share: guards, check, prediction and attachment. A method adds its recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.compat import native_cache, unwrap_module
from ...core.options import BOOLEAN, GOT, take, take_plain
from ...core.place import Rank
from ...core.run import Run
from ...core.state import PerRun
from ...core.wrappers import replicated, shard_group
from ...errors import DiffaccelError, IncompatibleError, InvalidOptionError, UnsupportedModelError, unknown
from ...extrapolation.forecast import Forecast
from ...models.controls import acts_between_blocks
from ..build import put_on, why_unfit
from ..control import Control
from ..engine import BRANCHES, CacheRecipe, Engine
from ..guards import Guards
from ..scopes.denoiser import Denoiser
from ..scopes.stack import blocks_of

if TYPE_CHECKING:
    from ..following import Follower
    from ..steering import Controller, StepRules

# The parameters of `StepCache` that are guards.
GUARDED = ("min_steps", "warmup_steps", "last_steps", "max_consecutive", "max_total", "start", "end", "max_bytes")


def controlled(target: Target, recipe: CacheRecipe) -> str | None:
    """Why a cache that looks at blocks would step aside in every call of this pipeline, or None."""
    if not recipe.scope.looks_inside(recipe.policy):
        return None
    found = acts_between_blocks(getattr(target.pipe, "components", {}))
    if found is None:
        return None
    return (
        f"the {found} of {type(target.pipe).__name__} acts on blocks from outside; caches of the whole "
        "output act: adaptive, schedule, taylorseer, easycache, interval with cache_scope='denoiser'"
    )


def counted(cache: StepCache, target: Target) -> int:
    """How many blocks the main denoiser has."""
    return len(blocks_of(unwrap_module(cache.main(target)), target.spec))


def checkpoint(target: Target) -> str | None:
    """The name under which the pipeline's weights are known (the tables are keyed by it), or None."""
    pipe = target.pipe
    sources = (pipe, *(getattr(pipe, name, None) for name in target.spec.denoisers))
    names = (getattr(getattr(source, "config", None), "_name_or_path", None) for source in sources)
    return next((name for name in names if name), None)


@dataclass(frozen=True, kw_only=True)
class StepCache:
    """Base of all step caches. The fields below are parameters of every one of them.

    Attributes:
        min_steps: loops with fewer steps are computed in full (few-step models have no redundancy to use).
        warmup_steps: so many steps at the start are always computed (the first one always is).
        last_steps: so many steps at the end are always computed.
        max_consecutive: at most so many reused steps in a row; None: no limit.
        max_total: at most so many reused steps in a loop; None: no limit.
        start, end: shares of the loop between which a reuse is allowed.
        max_bytes: what one guidance branch may hold; None: no limit.
        branches: "each" guidance branch decides for itself, or the "first" of a step (the conditional one) for all.
        per_sample: in a batch, every sample decides for itself and gets the picture of its single run; a step is left
            out where all of them ask for it. Otherwise one mean decides for all.
        float32: remember tensors in float32 rather than in the model's own dtype (doubles the memory of bf16).
    """

    min_steps: int = 9
    warmup_steps: int = 0
    last_steps: int = 1
    max_consecutive: int | None = None
    max_total: int | None = None
    start: float = 0.0
    end: float = 1.0
    max_bytes: int | None = None
    branches: str = "each"
    per_sample: bool = False
    float32: bool = False

    name: ClassVar[str]
    slot: ClassVar[Slot] = Slot.CALL
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __post_init__(self) -> None:
        if self.branches not in BRANCHES:
            raise unknown("branches", str(self.branches), BRANCHES)
        take_plain(self)
        take(self, BOOLEAN, "per_sample", "float32", form=GOT)
        self.guards()

    def guards(self, **more: Any) -> Guards:
        """The guards, validated; `more` are further ones, or take the place of these."""
        return Guards(**{**{name: getattr(self, name) for name in GUARDED}, **more})

    def params(self) -> dict[str, Any]:
        """The parameters for a plan: a method's own first, then those that all share."""
        shared = [f.name for f in fields(StepCache)]
        own = [f.name for f in fields(self) if f.name not in shared]
        return {name: getattr(self, name) for name in (*own, *shared)}

    def recipe(self, target: Target) -> CacheRecipe:
        """Gate, predictor, guards and scope on this target; raises where the target lacks what the method needs."""
        raise NotImplementedError

    def off(self) -> str | None:
        """Why these parameters turn the cache off, or None."""
        return "threshold 0: every step is computed" if getattr(self, "threshold", None) == 0 else None

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """One clause for the plan: what decides about what."""
        left_out = len(recipe.scope.left_out(unwrap_module(self.main(target)), target.spec))
        return f"{type(recipe.policy.gate).__name__} decides about {left_out} module(s)"

    def full_recipe(self, target: Target) -> CacheRecipe:
        """The recipe with the parameters that all methods share."""
        more = {"branches": self.branches, "float32": self.float32, "per_sample": self.per_sample}
        recipe = replace(self.recipe(target), **more)  # type: ignore[arg-type]
        if recipe.process_group is None and target.spec.denoisers:  # members of FSDP gather the same layers, or wait
            recipe = replace(recipe, process_group=shard_group(self.main(target)))
        return recipe

    # ---- the spine of a lever --------------------------------------------------------------------------

    @staticmethod
    def _denoisers(target: Target) -> Iterator[tuple[str, torch.nn.Module]]:
        for component in target.spec.denoisers:
            module = getattr(target.pipe, component, None)
            if module is not None:
                yield component, module

    def main(self, target: Target) -> torch.nn.Module:
        """The main denoiser."""
        return next(module for _, module in self._denoisers(target))

    def check(self, target: Target) -> Verdict:
        """Needs a denoiser that the recipe can act on, and no other cache on it."""
        try:
            recipe = self.full_recipe(target)
        except InvalidOptionError:
            raise
        except DiffaccelError as error:
            return Verdict.no(str(error), type(error))
        reason = controlled(target, recipe) if self.off() is None else None
        if reason is not None:
            return Verdict.no(reason)
        for component, module in self._denoisers(target):
            other = native_cache(module)
            if other is not None:
                return Verdict.refuse(
                    f"diffusers' own cache ({other}) is on {component}: call pipe.{component}.disable_cache() first",
                    IncompatibleError,
                )
            copies = replicated(module)
            if copies and not isinstance(recipe.scope, Denoiser):
                return Verdict.no(f"{component}: {copies}: take a cache of the whole denoiser (schedule, easycache)")
            reason = why_unfit(recipe, unwrap_module(module), target.spec)
            if reason is not None:
                return Verdict.no(f"{component}: {reason}" if len(target.spec.denoisers) > 1 else reason)
        if not target.spec.denoisers:
            return Verdict.no(f"{target.spec.family}: {target.spec.no_stack}", UnsupportedModelError)
        off = self.off()
        if off is not None:
            return Verdict.yes(off)
        least = recipe.policy.guards.min_steps
        down = f"; runs of fewer than {least} steps are computed in full" if least else ""
        return Verdict.yes(f"{self.describe(recipe, target)}{_uncorrected(recipe, target)}{down}")

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Share of the denoiser's parameters that a reused step does not touch (counted on the model)."""
        module = unwrap_module(self.main(target))
        total = sum(p.numel() for p in module.parameters())
        blocks = [block for block, _ in blocks_of(module, target.spec)]
        if self.off() is not None:
            return {"blocks_skipped": f"0 of {len(blocks)}", "origin": "computed"}
        left_out = self.full_recipe(target).scope.left_out(module, target.spec)
        skipped = sum(p.numel() for part in left_out for p in part.parameters())
        share: dict[str, Any] = {"parameters_skipped": round(skipped / total, 3), "origin": "computed"}
        count = sum(part in blocks for part in left_out)
        return {"blocks_skipped": f"{count} of {len(blocks)}", **share} if count else share

    def attach(self, target: Target, site: Site) -> Edit:
        """Hook every denoiser."""
        on = _Attached(self.name, self.off() is not None)
        try:
            recipe = self.full_recipe(target)
            on.control = Control(self.name, getattr(target.pipe, "components", {}), site.rank)
            on.steps = None if recipe.steps is None else replace(recipe.steps, process_group=recipe.process_group)
            on.follower = follower_of(self.name, recipe)
            for component, root in site.roots.items():
                module = unwrap_module(getattr(target.pipe, component))
                on.add(put_on(self.name, module, root, target.spec, recipe, site.rank), site.rank)
        except BaseException:
            on.undo()
            raise
        return Edit(
            self.name,
            on.undo,
            displaced=on.displaced,
            begin_run=on.begin_run,
            end_run=on.end_run,
            relink=on.relink,
            bytes_held=on.bytes_held,
            stats=on.stats,
        )


def _uncorrected(recipe: CacheRecipe, target: Target) -> str:
    """Why the correction that was asked for will be left out, or ""."""
    scheduler = getattr(target.pipe, "scheduler", None)
    if not recipe.scope.correction() or scheduler is None:
        return ""
    from ..levels import why_never

    reason = why_never(scheduler)
    return f"; no correction: {reason}" if reason else ""


def follower_of(name: str, recipe: CacheRecipe) -> Follower | None:
    """Who corrects under schedulers that are not Euler's; None where nothing is corrected afterwards."""
    order, forecast = recipe.scope.correction(), recipe.policy.predictor
    if not order or recipe.per_sample or not isinstance(forecast, Forecast):
        return None
    from ..following import Follower  # loaded where it is wanted

    return Follower(name, order, forecast.coordinate)


class _Attached:
    """A cache that is on: one engine per denoiser, and what they say of a run together."""

    def __init__(self, name: str, off: bool) -> None:
        self.name, self.off = name, off
        self.steps: StepRules | None = None
        self.follower: Follower | None = None
        self.engines: list[Engine] = []
        self.control: Control | None = None

    def add(self, engine: Engine, rank: Rank) -> None:
        """One more denoiser."""
        self.engines.append(engine)
        engine.control = self.control
        if self.control is not None:
            self.control.listen(engine.root, engine.spec, rank)

    def undo(self) -> None:
        """Take all of them off."""
        if self.control is not None:
            self.control.undo()
        for engine in reversed(self.engines):
            engine.undo()

    def relink(self) -> None:
        """Put back hooks that others dropped."""
        for engine in self.engines:
            engine.hooks.relink()
        if self.control is not None:
            self.control.relink()

    def displaced(self) -> str:
        """Who has taken the place of one of them, or ""."""
        return next((why for engine in self.engines if (why := engine.displaced())), "")

    def begin_run(self, run: Run) -> None:
        """State for this run."""
        if self.off:
            return
        run.state[self.name] = PerRun()
        if self.steps is not None:
            run.sampler = self.steps.controller(self.name)
        elif self.follower is not None:
            run.sampler = self.follower
        if self.control is not None:
            self.control.begin_run(run, {engine.root.component: engine.module for engine in self.engines})

    def end_run(self, run: Run) -> None:
        """Free it; say so where nothing was reused."""
        for engine in self.engines:
            engine.end_run()
        if self.control is not None:
            self.control.end_run(run)
        down = any(note.startswith(self.name) for note in run.notes)
        asked = any(call.gate is not None for call in run.calls)
        if len(run.calls) > 1 and run.ticks and not (self.off or self._hits(run) or asked or down):
            run.note(f"{self.name} reused nothing: its guards or its schedule had every step computed")

    def bytes_held(self, run: Run) -> int:
        """What they still hold."""
        return sum(engine.bytes_held() for engine in self.engines)

    def stats(self, run: Run) -> dict[str, object]:
        """Reused calls / all."""
        more = {} if self.control is None else dict(self.control.stats(run))
        if self.steps is not None and run.sampler is not None:
            more |= cast("Controller", run.sampler).stats()
        return {"hit_rate": round(self._hits(run) / len(run.calls), 4) if run.calls else 0.0, **more}

    def _hits(self, run: Run) -> int:
        return sum(call.by == self.name for call in run.calls)


@dataclass(frozen=True, kw_only=True)
class Extrapolating(StepCache):
    """A step cache whose reuse may be a forecast.

    Attributes:
        order: 0 reuses the last computed step as it is, 1 to 3 extrapolate the last order + 1 computed steps.
        basis: "newton" (divided differences, exact on polynomials), "ladder" (as TaylorSeer publishes it), "hermite".
        coordinate: "step", "timestep" or "sigma": the axis along which features are extrapolated.
        max_gain: the order is lowered where old errors would be amplified by more than this; None: never.
    """

    order: int = 0
    basis: str = "newton"
    coordinate: str = "step"
    max_gain: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.forecast()

    def forecast(self) -> Forecast:
        """The predictor, validated."""
        return Forecast(self.order, self.basis, self.coordinate, self.max_gain)
