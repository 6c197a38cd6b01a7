"""The engine: one recipe on one denoiser. It decides, forecasts and remembers; the scope's hooks skip modules.

Where a decision falls depends on what the gate looks at: before the denoiser runs (nothing, the time embedding, the
denoiser's input), in front of the first block (its modulated input), or behind the front blocks (their residual).
Static gates are decided for the whole loop when it begins. Between runs the denoiser's forwards are what they were;
a skip is an edit of the chain that lasts one denoiser call (under the root hook's lock).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch

from ..core.compat import eager, native_cache, set_eval_frame
from ..core.listener import Listener
from ..core.root import RootHook
from ..core.run import Call, Run
from ..core.state import PerRun
from ..models.spec import ModelSpec
from .branches import (
    DOUBLED,
    BranchState,
    Form,
    carry_half,
    conditional_half,
    first_input,
    fitted,
    foresee_loop,
    forget_earlier_experts,
    form_of_list,
    new_branch,
    rows_of,
    why_loop_stands_down,
)
from .control import Control
from .gates.base import AT_ROOT, INPUT, OUTPUT, SAMPLER
from .grouped import GroupedPolicy
from .observe import Observer
from .policy import ALL, Policy, bytes_held, cut_tokens, forecast_error, new_memory
from .step import Step

if TYPE_CHECKING:
    from .steering import Controller, StepRules

BRANCHES = ("each", "first")


class ScopeHooks(Protocol):
    """The hooks of one scope on one denoiser."""

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


class Scope:
    """Which part of the denoiser a reused step leaves out: a frozen config, in one file with its hooks."""

    takes_samples: ClassVar[bool] = False  # whether samples of a batch can decide for themselves

    def correction(self) -> int:
        """Order with which a computed step makes good what forecasts before it missed; 0: not at all."""
        return 0

    def looks_inside(self, policy: Policy) -> bool:
        """Does it look at blocks, or leave some of them out? Then what acts on blocks from outside is in its way."""
        return True

    def unfit(self, policy: Policy, module: torch.nn.Module, spec: ModelSpec) -> str | None:
        """Why a cache of this scope and policy cannot act on this denoiser, or None."""
        raise NotImplementedError

    def left_out(self, module: torch.nn.Module, spec: ModelSpec) -> list[torch.nn.Module]:
        """The modules whose weights a reused step does not touch."""
        raise NotImplementedError

    def install(self, engine: Engine) -> ScopeHooks:
        """Hook the engine's denoiser; on an error nothing stays."""
        raise NotImplementedError


@dataclass(frozen=True)
class CacheRecipe:
    """What a step cache is made of.

    Attributes:
        policy: gate, predictor and guards.
        scope: what a reused step leaves out.
        branches: "each" guidance branch decides for itself, or the "first" one of a step for all of that step.
        float32: remember tensors in float32 rather than in the model's own dtype.
        process_group: members that must decide alike (`torch.distributed`); None for this process alone.
        per_sample: every sample of a batch decides for itself (`grouped.GroupedPolicy`).
        steps: how the run is led at the sampler, for a gate that looks there (`steering.Controller`).
    """

    policy: Policy
    scope: Scope
    branches: str = "each"
    float32: bool = False
    process_group: Any = None
    per_sample: bool = False
    steps: StepRules | None = None


class Engine(Listener):
    """A recipe at work on one denoiser."""

    def __init__(
        self, name: str, module: torch.nn.Module, root: RootHook, spec: ModelSpec, recipe: CacheRecipe
    ) -> None:
        self.name, self.module, self.root, self.spec, self.recipe = name, module, root, spec, recipe
        self.at_root, self.group = recipe.policy.gate.observes in AT_ROOT, recipe.process_group
        self.inside = recipe.scope.looks_inside(recipe.policy)
        self.control: Control | None = None  # watches what the denoiser is told beside latents, time and prompt
        self.corrects = recipe.scope.correction() > 0
        self.steered = recipe.policy.gate.observes == SAMPLER
        self.scheduled = recipe.policy.reads_schedule or self.corrects  # whether noise levels or timesteps are wanted
        self.branch: BranchState | None = None  # of the call in progress, None where the cache keeps out of it
        self.call: Call | None = None
        self.step: Step
        self.main: Any = None  # the denoiser's main input
        self.seen: Any = None
        self.deciding = False  # the decision is still to come, inside the denoiser
        self.computing = False
        self.asked: tuple[Run, int] | None = None  # the loop that `sits_out` is about
        self.sits_out = False
        self.stop_listening: Callable[[], None] = lambda: None
        self.lead: tuple[Run, int, int, Any] | None = None  # (run, loop, step, hit or hits) of the step's first branch
        self.hooks: ScopeHooks = recipe.scope.install(self)

    # ---- one denoiser call -----------------------------------------------------------------------------

    @eager
    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run."""
        run = call.run
        states = run.state.get(self.name)
        if states is None or call.answer is not None:
            return
        if self.asked != (run, run.loop):  # once per loop; what it depends on does not change inside one
            self.asked, self.sits_out = (run, run.loop), self._stands_down(run)
        if self.sits_out:
            return
        outside = self._acts_on_blocks(call, kwargs)
        if outside is not None:
            run.note(f"{self.name} stood down in some calls: {outside} was given, which acts on blocks from outside")
            return
        main = self.main = kwargs[self.spec.input] if self.spec.input in kwargs else first_input(args, kwargs)
        branch: BranchState | None = states.get((call.component, call.branch))
        form = (main.shape, main.dtype, main.device) if isinstance(main, torch.Tensor) else form_of_list(main)
        whole: Any = states.get((call.component, DOUBLED))
        told = 0 if self.control is None else self.control.stamp(call, kwargs, self.spec)
        whole = None if whole is not None and whole.told != told else whole
        known = branch is not None and branch.loop == call.loop and branch.form == form and branch.told == told
        if branch is None or not known or (whole not in (None, branch) and whole.memory.last > branch.memory.last):
            branch = self._carry_half(whole, call, form) or (branch if known else None)
            branch = branch or self._begin_branch(call, form, args, kwargs)
            if branch is None:
                return
            branch.told = told
            forget_earlier_experts(states, call)
            states[call.component, call.branch] = branch
        self.branch, self.call = branch, call
        self.step = self._step(call) if self.scheduled else Step(call.step, run.total, None, None, self.group)
        if self.recipe.branches == "first" and self._follows(call):
            return
        if not self.at_root:
            self.deciding = True
        elif self.steered:
            led = cast("Controller", run.sampler)
            self.decide(led.reuses(call, rows_of(form), branch.told))
            led.hear(branch.policy, branch.memory)
        elif branch.foreseen is None:
            self.decide(branch.observer.at_root(main, call.step))
        else:
            self._decide_foreseen(branch, call)

    def _acts_on_blocks(self, call: Call, kwargs: dict[str, Any]) -> str | None:
        """An argument of this call that is in the way, or None."""
        if not self.inside and self.control is not None:
            return self.control.unexplained(call, kwargs, self.spec)
        return next((name for name in self.spec.stand_down if kwargs.get(name) is not None), None)

    def _stands_down(self, run: Run) -> bool:
        reason = self.displaced() or why_loop_stands_down(self.recipe.policy, run)
        reason = reason or (cast("Controller", run.sampler).why_not(run) if self.steered else None)
        if reason is not None:
            run.note(f"{self.name} stood down: {reason}")
        return reason is not None

    def displaced(self) -> str:
        """Was a cache of diffusers switched on since? In a clause; "" where none was."""
        other = native_cache(self.module)
        if other is None:
            return ""
        where = self.root.component
        return f"diffusers' own cache ({other}) was switched on since (pipe.{where}.disable_cache() ends it)"

    def _carry_half(self, whole: BranchState | None, call: Call, form: Form) -> BranchState | None:
        """State for a call on the conditional half of a batch that was run doubled until now, or None."""
        half = conditional_half(whole, call, form, self.spec.conditional_first)
        if whole is None or half is None:
            return None
        policy = fitted(self.recipe.policy, self.name, self.spec, call, self._sigmas(call.run))
        return carry_half(whole, half, form, policy)

    def _begin_branch(
        self, call: Call, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BranchState | None:
        """State for a branch in a loop; None, with a note, where the gate cannot see what it looks at."""
        run, sigmas = call.run, self._sigmas(call.run)
        policy = fitted(self.recipe.policy, self.name, self.spec, call, sigmas)
        branch = new_branch(call, form, policy, self.recipe.per_sample, Observer(self.spec, self.module, policy.gate))
        reason = branch.observer.open_loop(run, args, kwargs)
        if reason is not None:
            run.note(f"{self.name} stood down: {reason}")
            self.sits_out = True
            return None
        foresee_loop(branch, policy, run, sigmas or ())
        return branch

    def _sigmas(self, run: Run) -> tuple[float, ...] | None:
        return (tuple(run.schedule()[1]) or None) if self.scheduled else None

    def _step(self, call: Call) -> Step:
        run = call.run
        timesteps, sigmas = run.schedule()
        timestep = timesteps[call.step] if call.step < len(timesteps) else None
        sigma = sigmas[call.step] if call.step < len(sigmas) else None
        return Step(call.step, run.total, timestep, sigma, self.group)

    # ---- the decision ----------------------------------------------------------------------------------

    def _follows(self, call: Call) -> bool:
        """A later branch of this step does what the first one did."""
        lead = self.lead
        if lead is None or lead[:3] != (call.run, call.loop, call.step):
            return False
        assert self.branch is not None
        hit, self.branch.memory = self.branch.policy.follow(self.branch.memory, lead[3], self.step)
        self._settle(hit, None)
        return True

    def _decide_foreseen(self, branch: BranchState, call: Call) -> None:
        """Do what was decided before the loop, where anything is remembered that a reuse could use."""
        assert branch.foreseen is not None
        old, index = branch.memory, call.step
        hit = branch.foreseen.hits[index] and bool(old.history) and old.last == index - 1
        branch.memory = new_memory((old.gate, old.counts, old.history, branch.foreseen.values[index], index))
        self._settle(hit, None)

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
        self.deciding, self.seen, call.gate = False, seen, branch.memory.value
        if self.recipe.branches == "first" and (
            self.lead is None or self.lead[:3] != (call.run, call.loop, call.step)
        ):
            alike = branch.policy.verdicts(branch.memory) if isinstance(branch.policy, GroupedPolicy) else hit
            self.lead = (call.run, call.loop, call.step, alike)
        if hit:
            call.computed, call.by = False, self.name
            self.hooks.skip()
        else:
            self.computing = True
            if self.corrects or self.recipe.per_sample:
                self.hooks.compute()

    # ---- what is reused, and what is remembered --------------------------------------------------------

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

    def cut_tokens(self, count: int) -> None:
        """Blocks see `count` tokens from here on. A batch given as a list is padded to its longest caption, so that
        half of a doubled batch may have fewer tokens than the whole had; what was padding goes."""
        branch = self.branch
        assert branch is not None
        history = branch.memory.history
        if history and any(value.ndim == 3 and value.shape[1] > count for value in history[-1].values):
            branch.memory = cut_tokens(branch.memory, count)

    def answers(self) -> list[tuple[list[int], tuple[torch.Tensor, ...]]]:
        """At a computed step: the rows of samples that are reused all the same, and their forecasts per stream."""
        branch = self.branch
        assert branch is not None
        policy = branch.policy
        return policy.answers(branch.memory, self.step, self.seen) if isinstance(policy, GroupedPolicy) else []

    @eager
    def store(self, values: tuple[torch.Tensor, ...]) -> None:
        """The scope was computed: note what a forecast would have missed, and remember `values`, one per stream."""
        branch, call = self.branch, self.call
        assert branch is not None and call is not None
        policy, before = branch.policy, branch.memory
        compiling = set_eval_frame(None)
        try:
            if self.recipe.float32:
                values = tuple([value.float() for value in values])
            if isinstance(policy, GroupedPolicy):
                call.error = policy.error(before, self.step, values, self.seen) if before.history else None
            elif before.history and policy.gate.observes != SAMPLER:
                call.error = forecast_error(policy, before, self.step, values, self.seen)
            output = values[0] if policy.gate.observes == OUTPUT else None
            branch.memory = policy.store(before, self.step, values, self.seen, output)
            grown = len(branch.memory.history) != len(before.history) or not branch.bytes
            if grown and (branch.holding is None or branch.holding.history[call.step]):
                self._weigh(branch, call)  # what is let go again at the end of the call does not count
        finally:
            set_eval_frame(compiling)

    def _let_go(self, branch: BranchState, call: Call) -> None:
        """Hold no more than what a later step may use; what a correction wants stays for the next computed step."""
        assert branch.holding is not None
        history, gate = branch.holding.history[call.step], branch.holding.gate[call.step]
        wanted = history or (self.corrects and not self.computing)
        branch.memory = branch.policy.without(branch.memory, not wanted, not gate)
        self._weigh(branch, call)

    def _weigh(self, branch: BranchState, call: Call) -> None:
        branch.bytes = bytes_held(branch.memory)
        call.run.hold(self.name, bytes_held(*[state.memory for state in call.run.state[self.name].values()]))

    def end_call(self, call: Call) -> None:
        """The denoiser returned or raised."""
        branch = self.branch
        if branch is None:
            return
        try:
            self.hooks.release(call)
            if branch.policy.gate.observes == INPUT and call.output is not None:
                if self.computing:
                    output = branch.observer.output(call.output)
                    branch.memory = branch.policy.record(branch.memory, self.step, self.seen, output)
                if branch.memory.counts.consecutive < 2:  # what such a gate keeps grows behind a computed step
                    self._weigh(branch, call)
            held = branch.holding
            if held is not None and call.output is not None and not (held.history[call.step] and held.gate[call.step]):
                self._let_go(branch, call)
        finally:
            self.branch = self.call = self.main = self.seen = None
            self.deciding = self.computing = False

    def will_compute(self, run: Run, step: int, component: str, branch: str) -> bool | None:
        """Is the scope computed in that call? None where only the call itself can tell."""
        if self.asked == (run, run.loop) and self.sits_out:
            return True
        if self.steered:
            return cast("Controller", run.sampler).will_compute(run, step)
        known = run.state.get(self.name, PerRun()).get((component, branch))
        if known is None or known.foreseen is None or known.loop != run.loop:
            return None
        return not (step < len(known.foreseen.hits) and known.foreseen.hits[step])

    def bytes_held(self) -> int:
        """Bytes this engine refers to outside of a run's own state: none between calls."""
        return 0 if self.branch is None else self.branch.bytes

    def end_run(self) -> None:
        """Forget the run."""
        self.asked = self.lead = None

    def undo(self) -> None:
        """Leave the model as it was found."""
        self.stop_listening()
        self.hooks.undo()
