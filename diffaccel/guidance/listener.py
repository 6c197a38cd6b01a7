"""Listens to one denoiser, and answers for the unconditional branch: for a call of its own, or for half a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..core.compat import leaves, unwrap_module
from ..core.listener import Listener
from ..core.place import Rank
from ..core.root import RootHook
from ..core.run import Call, Run
from ..models.spec import ModelSpec
from .difference import BranchAction, DifferenceMemory, GuidanceSteps, difference, unconditional
from .halves import Unclear, half_of_inputs, half_of_output, join, likeness, repeats, rows

if TYPE_CHECKING:
    from .reuse import GuidanceReuse

CONDITIONAL = ("cond", "pred_cond")  # diffusers' cache contexts; the second ones are those of its guiders
UNCONDITIONAL = ("uncond", "pred_uncond")
BATCHED_CALL = "cond_uncond"


class GuidanceListener(Listener):
    """One denoiser's share of the lever. Attach with the constructor, end with `undo`."""

    rewrites = True  # half of a batch

    def __init__(
        self, lever: GuidanceReuse, root: RootHook, module: torch.nn.Module, spec: ModelSpec, rank: Rank
    ) -> None:
        self.lever, self.module, self.spec = lever, module, spec
        self.names = list(inspect.signature(type(unwrap_module(module)).forward).parameters)[1:]
        self.asked: tuple[Run, int] | None = None  # the loop that `steps` is about
        self.steps: GuidanceSteps | None = None  # None: the lever sits out
        self.cond: tuple[Any, Any] | None = None  # place (run, loop, step, likeness) and output of a conditional call
        self.undo = root.add(self, rank)  # stop listening

    # ---- one denoiser call -----------------------------------------------------------------------------

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run."""
        if self.lever.name not in call.run.state or call.answer is not None:
            return
        if self.asked != (call.run, call.run.loop):
            self.asked, self.steps = (call.run, call.run.loop), self.lever.steps(call.run, self.module)
        if self.steps is None:
            return
        main = args[0] if args else kwargs.get(self.names[0])
        if not isinstance(main, (torch.Tensor, list)):
            return
        like = likeness(main)
        if call.branch in CONDITIONAL:
            self._watch(call, lambda output: self._keep(call, like, output))
        elif call.branch in UNCONDITIONAL:
            self._one_of_two_calls(call, self.steps, like)
        elif call.branch == BATCHED_CALL:
            self._one_batch(call, self.steps, main, args, kwargs)

    def _watch(self, call: Call, see: Callable[[Any], None]) -> None:
        """Let `see` have what the caller gets, whoever answers; nothing where the call raises."""

        def finish(output: Any) -> Any:
            see(output)
            return output

        call.finish = finish

    def end_run(self) -> None:
        """Forget the run."""
        self.asked = self.steps = self.cond = None

    def bytes_held(self) -> int:
        """Bytes this listener refers to outside of a run's own state."""
        return 0 if self.cond is None else sum(t.numel() * t.element_size() for t in leaves(self.cond[-1])[0])

    # ---- memory ----------------------------------------------------------------------------------------

    def _memory(self, call: Call, like: Any) -> DifferenceMemory:
        """What is known of this denoiser; nothing at the start of a loop, or where it is given something else."""
        found: DifferenceMemory | None = call.run.state[self.lever.name].get(call.component)
        if found is not None and found.loop == call.loop and found.like == like:
            return found
        return DifferenceMemory(call.loop, like, done={} if found is None else found.done)

    def _put(self, call: Call, memory: DifferenceMemory) -> None:
        run = call.run
        states = run.state[self.lever.name]
        states[call.component] = memory
        run.hold(self.lever.name, sum(state.bytes() for state in states.values()))

    def _learn(self, call: Call, memory: DifferenceMemory, cond: Any, uncond: Any) -> None:
        """Both branches were run: remember their difference."""
        ours, theirs = leaves(cond)[0], leaves(uncond)[0]
        if [likeness(t) for t in ours] != [likeness(t) for t in theirs]:
            self._note(call, "the two branches return tensors of different shapes", in_some=True)
            self._put(call, memory.forget())
            return
        at = self.lever.coordinate_of(call.run, call.step)
        depth = self.lever.forecast().depth
        self._put(call, memory.remember(call.step, at, difference(ours, theirs), depth))

    def _instead(self, call: Call, memory: DifferenceMemory, act: BranchAction, cond: Any) -> Any:
        """What stands for the unconditional output."""
        tensors, rebuild = leaves(cond)
        at = self.lever.coordinate_of(call.run, call.step)
        return rebuild(unconditional(tensors, memory, act, self.lever.forecast(), at))

    def _note(self, call: Call, reason: str, in_some: bool = False) -> None:
        call.run.note(f"{self.lever.name} stood down{' in some calls' if in_some else ''}: {reason}")

    # ---- two calls a step ------------------------------------------------------------------------------

    def _keep(self, call: Call, like: Any, output: Any) -> None:
        self.cond = (call.run, call.loop, call.step, like), output

    def _one_of_two_calls(self, call: Call, steps: GuidanceSteps, like: Any) -> None:
        (place, cond), self.cond = self.cond or (None, None), None
        if place is None or place[:3] != (call.run, call.loop, call.step):
            self._note(call, "the unconditional call comes before the conditional one, so nothing can stand for it")
            return
        if place[3] != like:
            self._note(call, "the two branches are given inputs of different shapes", in_some=True)
            return
        memory = self._memory(call, like)
        act = steps.act(call.step, memory.last)
        if act is BranchAction.BOTH:
            self._watch(call, lambda output: self._learn(call, memory, cond, output))
        else:
            call.answer, call.computed, call.by = self._instead(call, memory, act, cond), False, self.lever.name
            self._put(call, memory.count(act))

    # ---- both in one batch -----------------------------------------------------------------------------

    def _one_batch(
        self, call: Call, steps: GuidanceSteps, main: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        memory = self._memory(call, likeness(main))
        act = steps.act(call.step, memory.last)
        count, second = rows(main), not self.spec.conditional_first
        if not self._doubled(call, main, act):
            return
        if act is BranchAction.BOTH:
            self._watch(call, lambda output: self._learn_halves(call, memory, output, count))
            return
        try:
            call.inputs = half_of_inputs(self.names, args, kwargs, second, self.spec.batchless)
        except Unclear as reason:
            self._note(call, str(reason))
            return

        def finish(cond: Any) -> Any:
            uncond = self._instead(call, memory, act, cond)
            whole = join(uncond, cond) if second else join(cond, uncond)
            # A resumed run asks for what this call returned under the name that the pipeline's calls have.
            call.run.outputs[(call.component, BATCHED_CALL)] = whole
            self._put(call, memory.count(act))
            return whole

        call.finish, call.branch = finish, CONDITIONAL[0]

    def _doubled(self, call: Call, main: Any, act: BranchAction) -> bool:
        """Are there really two halves? Some pipelines give the call that name also without guidance.

        What the scheduler returned at the step before tells how many samples there are (no device is waited for).
        At the first step the halves are compared, but only where one of them would be left out right away.
        """
        run, count = call.run, rows(main)
        if count == 0 or count % 2 or getattr(run.pipe, "do_classifier_free_guidance", True) is False:
            return False
        stepped = leaves(run.step_output)[0] if call.step else []
        if stepped:
            doubled = count == 2 * rows(stepped[0])
            if not doubled and call.step == 1:  # what the first step learned was of something else
                run.state[self.lever.name].pop(call.component, None)
            return doubled
        return act is BranchAction.BOTH or repeats(main)

    def _learn_halves(self, call: Call, memory: DifferenceMemory, output: Any, count: int) -> None:
        try:
            first, last = (half_of_output(output, count, second) for second in (False, True))
        except Unclear as reason:
            self._note(call, str(reason))
            return
        cond, uncond = (first, last) if self.spec.conditional_first else (last, first)
        self._learn(call, memory, cond, uncond)


def sum_done(states: dict[str, DifferenceMemory]) -> dict[BranchAction, int]:
    """How often each act was taken, over all denoisers."""
    total: dict[BranchAction, int] = {}
    for memory in states.values():
        for act, count in memory.done.items():
            total[act] = total.get(act, 0) + count
    return total
