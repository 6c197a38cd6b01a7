"""What a cache keeps of one guidance branch of one denoiser in one loop, and when a loop must do without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.run import Call, Run
from ..errors import InvalidOptionError
from ..models.spec import ModelSpec
from .grouped import GroupedPolicy, groups_of
from .observe import Observer
from .policy import Foreseen, Holding, Memory, Policy, foresee, half_of, holding

DOUBLED = "cond_uncond"  # name of a call that holds both guidance branches
HALVES = ("cond", DOUBLED)  # names of calls on its conditional half (some pipelines name any call so)

Form = tuple[Any, ...]  # shapes, dtypes and devices of the denoiser's main input, which must not change within a loop


class BranchState:
    """One guidance branch of one denoiser in one loop. `policy` is fitted to both; `memory` is all it remembers.

    Attributes:
        loop, form: a branch is begun anew when either changes.
        bytes: what `memory` holds.
        template: structure of what the scope remembers, for the hooks that answer in its stead.
        foreseen: the decisions of the whole loop, where they are known before it.
        holding: what to hold after each step; None where that is all.
        told: number of the conditions it was begun under (`control.Control.stamp`); begun anew when they change.
        missed: (index, coordinate) of reused steps since a computed one, for corrections.
    """

    __slots__ = (
        "bytes", "foreseen", "form", "holding", "loop", "memory", "missed", "observer", "policy", "template",
        "told",
    )  # fmt: skip

    def __init__(self, loop: int, form: Form) -> None:
        self.loop, self.form = loop, form
        self.bytes = 0
        self.template: Any = None
        self.foreseen: Foreseen | None = None
        self.holding: Holding | None = None
        self.missed: tuple[tuple[int, float], ...] = ()
        self.told = 0
        self.policy: Policy | GroupedPolicy
        self.observer: Observer
        self.memory: Memory


def form_of_list(main: Sequence[torch.Tensor]) -> Form:
    """What must not change within a loop: shapes, dtypes and devices of the pictures of a batch."""
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in main)


def rows_of(form: Form) -> int:
    """How many samples the main input holds."""
    return int(form[0][0]) if isinstance(form[0], torch.Size) else len(form)


def why_loop_stands_down(policy: Policy, run: Run) -> str | None:
    """Why the loop that begins is computed in full, or None. Host data only; reads the schedule where it is wanted."""
    reason = policy.guards.stands_down(run.total)
    if reason is None and torch.is_grad_enabled():
        reason = "gradients are enabled (wrap the loop in torch.no_grad())"
    order = getattr(run.scheduler, "order", 1)
    if reason is None and order > 1:
        reason = f"{type(run.scheduler).__name__} is of order {order}: its noise levels go back and forth"
    if reason is None and policy.reads_schedule and not _has_levels(policy, run):
        reason = f"{type(run.scheduler).__name__} gives no noise levels, which this cache needs"
    if reason is None and policy.gate.reads_schedule:
        reason = policy.gate.unfit(run.schedule()[1])
    return reason


def _has_levels(policy: Policy, run: Run) -> bool:
    timesteps, sigmas = run.schedule()
    wants_timesteps = policy.predictor.coordinate == "timestep"
    return bool(timesteps) and (bool(sigmas) or (wants_timesteps and not policy.gate.reads_schedule))


def fitted(policy: Policy, name: str, spec: ModelSpec, call: Call, sigmas: tuple[float, ...] | None) -> Policy:
    """The policy for the loop, branch and expert of a call; `name` is the lever's, for what a misfit says."""
    run = call.run
    expert = steps_of_expert(spec, call) if policy.gate.by_expert else None
    try:
        made = policy.fit(run.total, call.branch, sigmas, run.begin, expert)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{name}: {error}") from None
    return replace(made, wary=policy.wary and run.begin == 0)


def steps_of_expert(spec: ModelSpec, call: Call) -> tuple[int, int] | None:
    """The first step and the end (exclusive) of the denoiser of this call, where two share the loop; else None.

    The pipeline's own rule: the first one runs at timesteps at or above a share of the training timesteps.
    """
    run = call.run
    share = getattr(getattr(run.pipe, "config", None), spec.boundary or "_", None)
    if share is None or run.total is None or run.scheduler is None:
        return None
    limit = share * run.scheduler.config.num_train_timesteps
    switch = sum(timestep >= limit for timestep in run.schedule()[0][: run.total])
    return (0, switch) if call.component == spec.denoisers[0] else (switch, run.total)


def new_branch(call: Call, form: Form, policy: Policy, per_sample: bool, observer: Observer) -> BranchState:
    """State for a branch in a loop, with nothing remembered yet. `policy` is fitted."""
    branch = BranchState(call.loop, form)
    branch.policy, branch.observer = policy, observer
    if per_sample and not policy.static:
        branch.policy = GroupedPolicy.of(policy, groups_of(rows_of(form), _doubled(call)))
    branch.memory = branch.policy.start()
    return branch


def foresee_loop(branch: BranchState, policy: Policy, run: Run, sigmas: tuple[float, ...]) -> None:
    """Decide the whole loop beforehand, where the gate looks at nothing that the loop makes, and what to hold in it.

    `policy` is the branch's, of one sample.
    """
    if run.total is None:
        return
    branch.holding = holding(policy, run.total, sigmas)
    if isinstance(branch.policy, Policy) and policy.static:
        branch.foreseen = foresee(policy, run.total, branch.observer.times, sigmas)


def forget_earlier_experts(states: dict[tuple[str, str], BranchState], call: Call) -> None:
    """An expert whose noise levels are over is not asked again: what it remembers goes."""
    for key in [k for k, old in states.items() if k[0] != call.component and old.memory.last < call.step]:
        del states[key]


def conditional_half(whole: BranchState | None, call: Call, form: Form, conditional_first: bool) -> slice | None:
    """The rows of `whole`, a doubled batch run at the step before, that this call on one half goes on from, or None.

    Guidance that ends in mid-run (the pipeline drops the unconditional half) and guidance reuse call so.
    """
    if whole is None or call.branch not in HALVES or whole.loop != call.loop or whole.memory.last != call.step - 1:
        return None
    rows = rows_of(whole.form)
    half = slice(0, rows // 2) if conditional_first else slice(rows // 2, rows)
    return half if rows % 2 == 0 and _part_of_form(whole.form, half) == form else None


def _part_of_form(form: Form, part: slice) -> Form:
    if isinstance(form[0], torch.Size):
        return torch.Size((part.stop - part.start, *form[0][1:])), *form[1:]
    return form[part]


def carry_half(whole: BranchState, half: slice, form: Form, policy: Policy) -> BranchState:
    """State for calls on the rows `half` of a doubled batch, with what the batch remembers of them. `policy` is
    fitted to such calls; tensors share their storage with the whole's."""
    branch, rows = BranchState(whole.loop, form), rows_of(whole.form)
    branch.policy, branch.observer, branch.foreseen = policy, whole.observer, whole.foreseen
    branch.template, branch.missed, branch.bytes = whole.template, whole.missed, whole.bytes
    branch.holding = whole.holding
    if isinstance(whole.policy, GroupedPolicy):
        branch.policy, branch.memory = whole.policy.half_of(policy, whole.memory, half, rows)
    else:
        branch.memory = half_of(whole.memory, rows, half)
    return branch


def _doubled(call: Call) -> bool:
    """Does this call hold both guidance branches? Pipelines may name it so without guidance."""
    return call.branch == DOUBLED and bool(getattr(call.run.pipe, "do_classifier_free_guidance", True))


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument, which carries the latents."""
    return args[0] if args else next(value for value in kwargs.values() if isinstance(value, torch.Tensor))
