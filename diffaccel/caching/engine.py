"""The engine: one policy on one denoiser. It decides, forecasts and remembers; a tap skips the scope's modules.

Where a decision falls depends on what the gate looks at: before the denoiser runs (nothing, the time embedding, the
denoiser's input), in front of the first block (its modulated input), or behind the front blocks (their residual).
Static gates are decided for the whole loop when it begins. Between runs the denoiser's forwards are what they were;
a skip is an edit of the chain that lasts one denoiser call (under the root hook's lock).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..core.chain import RootHook
from ..core.compat import eager, set_eval_frame
from ..core.run import Call, Run
from ..errors import InvalidOptionError
from ..models.spec import ModelSpec
from .gates.base import GRID, INPUT, NOTHING, OUTPUT, TIME
from .grouped import GroupedPolicy, groups_of
from .observe import Sights
from .policy import ALL, Foreseen, Memory, Policy, bytes_held, forecast_error, foresee, half_of, new_memory
from .scopes.config import BEHIND_FIRST_BLOCK, Denoiser, Scope
from .step import Step

BRANCHES = ("each", "first")
AT_ROOT = (NOTHING, TIME, INPUT, OUTPUT, GRID)


@dataclass(frozen=True)
class Recipe:
    """What a step cache is made of.

    Attributes:
        policy: gate, predictor and guards.
        scope: what a reused step leaves out.
        branches: "each" guidance branch decides for itself, or the "first" one of a step for all of that step.
        float32: remember tensors in float32 rather than in the model's own dtype.
        per_sample: every sample of a batch decides for itself (`grouped.GroupedPolicy`).
        process_group: members that must decide alike (`torch.distributed`); None for this process alone.
    """

    policy: Policy
    scope: Scope = BEHIND_FIRST_BLOCK
    branches: str = "each"
    float32: bool = False
    process_group: Any = None
    per_sample: bool = False


class Branch:
    """One guidance branch of one denoiser in one loop."""

    __slots__ = (
        "bytes", "foreseen", "form", "loop", "memory", "missed", "policy", "sights", "template",
    )  # fmt: skip

    def __init__(self, loop: int, form: tuple[Any, ...]) -> None:
        self.loop, self.form = loop, form  # a branch is begun anew when either changes
        self.bytes = 0
        self.template: Any = None  # structure of the denoiser's output, for the scope that answers in its stead
        self.foreseen: Foreseen | None = None
        self.missed: tuple[tuple[int, float], ...] = ()  # (index, coordinate) of reused steps since a computed one
        self.policy: Policy | GroupedPolicy
        self.sights: Sights
        self.memory: Memory


class Tap(Protocol):
    """The hooks of one scope."""

    def skip(self) -> None:
        """The call is a reuse: leave the scope's modules out of it, and use `engine.forecast()` instead."""

    def compute(self) -> None:
        """The call is computed (asked of corrections and of samples that decide for themselves only)."""

    def release(self, call: Call) -> None:
        """The call is over: put everything back."""

    def relink(self) -> None:
        """Put back hooks that others dropped since the last run."""

    def undo(self) -> None:
        """Leave the model as it was found."""


class Engine:
    """A recipe at work on one denoiser; `tap` is set by whoever builds it."""

    tap: Tap

    def __init__(self, name: str, module: torch.nn.Module, root: RootHook, spec: ModelSpec, recipe: Recipe) -> None:
        self.name, self.module, self.root, self.spec, self.recipe = name, module, root, spec, recipe
        self.at_root = recipe.policy.gate.observes in AT_ROOT
        self.corrects = isinstance(recipe.scope, Denoiser) and recipe.scope.correct > 0
        self.scheduled = recipe.policy.reads_schedule or self.corrects  # whether noise levels or timesteps are wanted
        self.branch: Branch | None = None  # of the call in progress, None where the cache keeps out of it
        self.call: Call | None = None
        self.step: Step
        self.main: Any = None  # the denoiser's main input
        self.seen: Any = None
        self.open = False  # the decision is still to come, inside the denoiser
        self.computing = False
        self.asked: tuple[Run, int] | None = None  # the loop that `sits_out` is about
        self.sits_out = False
        self.lead: tuple[Run, int, int, Any] | None = None  # (run, loop, step, hit or hits) of the step's first branch

    # ---- one denoiser call -----------------------------------------------------------------------------

    @eager
    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run."""
        run = call.run
        states = run.state.get(self.name)
        if states is None or call.answer is not None:
            return
        if self.asked != (run, run.loop):  # once per loop; what it depends on does not change inside one
            self.asked, self.sits_out = (run, run.loop), self._sits_out(run)
        if self.sits_out:
            return
        for name in self.spec.stand_down:
            if kwargs.get(name) is not None:
                run.note(f"{self.name} stood down in some calls: {name} was given, which acts on blocks from outside")
                return
        main = self.main = kwargs[self.spec.input] if self.spec.input in kwargs else _first(args, kwargs)
        branch = states.get((call.component, call.branch))
        form = (main.shape, main.dtype, main.device) if isinstance(main, torch.Tensor) else _form_of_list(main)
        if branch is None or branch.loop != call.loop or branch.form != form:
            branch = self._new_branch(call, form, args, kwargs)
            if branch is None:
                return
            for key in [k for k, old in states.items() if k[0] != call.component and old.memory.last < call.step]:
                del states[key]  # an expert whose noise levels are over is not asked again
            states[call.component, call.branch] = branch
        self.branch, self.call = branch, call
        group = self.recipe.process_group
        self.step = self._step(call) if self.scheduled else Step(call.step, run.total, None, None, group)
        if self.recipe.branches == "first" and self._follows(call):
            return
        if not self.at_root:
            self.open = True
            return
        foreseen = branch.foreseen
        if foreseen is None:
            self.decide(branch.sights.at_root(main, call.step))
        else:
            old, index = branch.memory, call.step
            hit = foreseen.hits[index] and bool(old.history) and old.last == index - 1
            branch.memory = new_memory((old.gate, old.tally, old.history, foreseen.values[index], index))
            self._settle(hit, None)

    def _sits_out(self, run: Run) -> bool:
        reason = self.recipe.policy.guards.stands_down(run.total)
        if reason is None and torch.is_grad_enabled():
            reason = "gradients are enabled (wrap the loop in torch.no_grad())"
        if reason is None and getattr(run.scheduler, "order", 1) > 1:
            order = run.scheduler.order
            reason = f"{type(run.scheduler).__name__} is of order {order}: its noise levels go back and forth"
        if reason is None and self.recipe.policy.reads_schedule and not _enough(self.recipe.policy, run):
            reason = f"{type(run.scheduler).__name__} gives no noise levels, which this cache needs"
        if reason is None and self.recipe.policy.gate.reads_schedule:
            reason = self.recipe.policy.gate.unfit(run.schedule()[1])
        if reason is not None:
            run.note(f"{self.name} stood down: {reason}")
        return reason is not None

    def _new_branch(
        self, call: Call, form: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Branch | None:
        """State for a branch in a loop, with the policy fitted to it and, for static gates, all of it decided."""
        run, branch = call.run, Branch(call.loop, form)
        policy = self.recipe.policy
        sigmas = self._sigmas(run)
        try:
            branch.policy = policy = policy.fit(run.total, call.branch, sigmas, run.begin)
        except InvalidOptionError as error:
            raise InvalidOptionError(f"{self.name}: {error}") from None
        if self.recipe.per_sample and not policy.static:
            branch.policy = GroupedPolicy.of(policy, groups_of(form[0][0], _doubled(call)))
        branch.memory = branch.policy.start()
        branch.sights = Sights(self.spec, self.module, policy.gate)
        reason = branch.sights.open_loop(run, args, kwargs)
        if reason is not None:
            run.note(f"{self.name} stood down: {reason}")
            self.sits_out = True
            return None
        if policy.static and run.total is not None:
            branch.foreseen = foresee(policy, run.total, branch.sights.times, sigmas or ())
        return branch

    def _sigmas(self, run: Run) -> tuple[float, ...] | None:
        return (tuple(run.schedule()[1]) or None) if self.scheduled else None

    def _step(self, call: Call) -> Step:
        run = call.run
        timesteps, sigmas = run.schedule()
        timestep = timesteps[call.step] if call.step < len(timesteps) else None
        sigma = sigmas[call.step] if call.step < len(sigmas) else None
        return Step(call.step, run.total, timestep, sigma, self.recipe.process_group)

    def _follows(self, call: Call) -> bool:
        """A later branch of this step does what the first one did."""
        lead = self.lead
        if lead is None or lead[:3] != (call.run, call.loop, call.step):
            return False
        assert self.branch is not None
        hit, self.branch.memory = self.branch.policy.follow(self.branch.memory, lead[3], self.step)
        self._settle(hit, None)
        return True

    @eager
    def decide(self, seen: Any) -> None:
        """The gate can see what it looks at: reuse, or compute and remember."""
        branch = self.branch
        assert branch is not None
        compiling = set_eval_frame(None)
        try:
            hit, branch.memory = branch.policy.decide(branch.memory, seen, self.step)
            self._settle(hit, seen)
        finally:
            set_eval_frame(compiling)

    def _settle(self, hit: bool, seen: Any) -> None:
        branch, call = self.branch, self.call
        assert branch is not None and call is not None
        self.open, self.seen, call.gate = False, seen, branch.memory.value
        if self.recipe.branches == "first" and (
            self.lead is None or self.lead[:3] != (call.run, call.loop, call.step)
        ):
            alike = branch.policy.verdicts(branch.memory) if isinstance(branch.policy, GroupedPolicy) else hit
            self.lead = (call.run, call.loop, call.step, alike)
        if hit:
            call.computed, call.by = False, self.name
            self.tap.skip()
        else:
            self.computing = True
            if self.corrects or self.recipe.per_sample:
                self.tap.compute()

    @eager
    def forecast(self, part: slice = ALL) -> tuple[torch.Tensor, ...]:
        """What the skipped part would have said at this step, per stream (of `part` of them)."""
        branch = self.branch
        assert branch is not None
        compiling = set_eval_frame(None)
        try:
            return branch.policy.forecast(branch.memory, self.step, self.seen, part)
        finally:
            set_eval_frame(compiling)

    def answers(self) -> list[tuple[list[int], tuple[torch.Tensor, ...]]]:
        """At a computed step: the rows of samples that are reused all the same, and their forecasts per stream."""
        branch = self.branch
        assert branch is not None
        policy = branch.policy
        return policy.answers(branch.memory, self.step, self.seen) if isinstance(policy, GroupedPolicy) else []

    @eager
    def store(self, values: tuple[torch.Tensor, ...]) -> None:
        """The scope was computed: note what a forecast would have missed, and remember `values`."""
        branch, call = self.branch, self.call
        assert branch is not None and call is not None
        policy, before = branch.policy, branch.memory
        compiling = set_eval_frame(None)
        try:
            if self.recipe.float32:
                values = tuple([value.float() for value in values])
            if isinstance(policy, GroupedPolicy):
                call.error = policy.error(before, self.step, values, self.seen) if before.history else None
            elif before.history:
                call.error = forecast_error(policy, before, self.step, values, self.seen)
            output = values[0] if policy.gate.observes == OUTPUT else None
            branch.memory = policy.store(before, self.step, values, self.seen, output)
            if len(branch.memory.history) != len(before.history) or not branch.bytes:
                self._weigh(branch, call)
        finally:
            set_eval_frame(compiling)

    def _weigh(self, branch: Branch, call: Call) -> None:
        branch.bytes = bytes_held(branch.memory)
        call.run.hold(self.name, bytes_held(*[state.memory for state in call.run.state[self.name].values()]))

    def end_call(self, call: Call) -> None:
        """The denoiser returned or raised."""
        branch = self.branch
        if branch is None:
            return
        try:
            self.tap.release(call)
            if branch.policy.gate.observes == INPUT and call.output is not None:
                if self.computing:
                    output = branch.sights.output(call.output)
                    branch.memory = branch.policy.record(branch.memory, self.step, self.seen, output)
                if branch.memory.tally.consecutive < 2:  # what such a gate keeps grows behind a computed step
                    self._weigh(branch, call)
            plain = isinstance(branch.policy, Policy) and isinstance(self.main, torch.Tensor)
            if call.half is not None and call.output is not None and plain:
                self._mirror(branch, call, *call.half)
        finally:
            self.branch = self.call = self.main = self.seen = None
            self.open = self.computing = False

    def _mirror(self, branch: Branch, call: Call, name: str, half: slice) -> None:
        """A doubled batch was run: what its half remembers is what calls on that half alone go on from."""
        rows, key = len(self.main), (call.component, name)
        shape, *rest = branch.form
        form = (torch.Size((half.stop - half.start, *shape[1:])), *rest)
        states = call.run.state[self.name]
        other = states.get(key)
        if other is None or other.loop != branch.loop or other.form != form:
            other = states[key] = Branch(branch.loop, form)
            other.policy = self.recipe.policy.fit(call.run.total, name, self._sigmas(call.run), call.run.begin)
            other.sights, other.foreseen = branch.sights, branch.foreseen
        other.memory, other.template, other.missed = half_of(branch.memory, rows, half), branch.template, branch.missed

    # ---- life ------------------------------------------------------------------------------------------

    def reuses(self, run: Run, step: int, component: str, branch: str) -> bool | None:
        """Will that call leave the scope out? None where only the call itself can tell."""
        if self.asked == (run, run.loop) and self.sits_out:
            return False
        known = run.state.get(self.name, {}).get((component, branch))
        if known is None or known.foreseen is None or known.loop != run.loop:
            return None
        return bool(step < len(known.foreseen.hits) and known.foreseen.hits[step])

    def bytes_held(self) -> int:
        """Bytes this engine refers to outside of a run's own state: none between calls."""
        return 0 if self.branch is None else self.branch.bytes

    def end_run(self) -> None:
        """Forget the run."""
        self.asked = self.lead = None

    def undo(self) -> None:
        """Leave the model as it was found."""
        if self in self.root.listeners:
            self.root.listeners.remove(self)
        self.tap.undo()


def _doubled(call: Call) -> bool:
    """Does this call hold both guidance branches? Pipelines may name it so without guidance."""
    return call.branch == "cond_uncond" and bool(getattr(call.run.pipe, "do_classifier_free_guidance", True))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument, which carries the latents."""
    return args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))


def _form_of_list(main: Any) -> tuple[Any, ...]:
    """What must not change within a loop: shapes, dtypes and devices of the pictures of a batch."""
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in main)


def _enough(policy: Policy, run: Run) -> bool:
    timesteps, sigmas = run.schedule()
    wants_timesteps = policy.predictor.coordinate == "timestep"
    return bool(timesteps) and (bool(sigmas) or (wants_timesteps and not policy.gate.reads_schedule))
