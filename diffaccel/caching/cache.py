"""The hook that joins gate, predictor and guards on the block stack of one denoiser.

The first block always runs. Its residual is compared with that of the last computed step; if it hardly moved,
the rest of the stack is not run: middle blocks hand their inputs through, and the last block returns
`first block's output + stored residual of the rest`. Between runs and on computed steps the blocks' forwards
are what they were; a skip is an edit of the chain that lasts one denoiser call (under the root hook's lock).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.hooks import Hook, Link, RootHook, install
from ..core.run import Call, Run
from ..models.spec import BlockList, ModelSpec
from .guards import Guards, must_compute, stands_down

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Predictor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class BranchState:
    """What one guidance branch of one denoiser remembers: [B, T, C] tensors of the last computed step."""

    __slots__ = ("consecutive", "probe", "residual")

    def __init__(self) -> None:
        self.probe: torch.Tensor | None = None  # residual of the first block
        self.residual: torch.Tensor | None = None  # residual of all the others
        self.consecutive = 0

    def bytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(t.numel() * t.element_size() for t in (self.probe, self.residual) if t is not None)


class _Head(Hook):
    """First block: takes the probe and decides."""

    def __init__(self, cache: BlockCache, blocks: BlockList) -> None:
        super().__init__()
        self.cache = cache
        self.position, self.name = blocks.inputs.index(cache.stream), cache.stream
        self.index = blocks.outputs.index(cache.stream) if len(blocks.outputs) > 1 else None

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = self.cache
        if cache.state is not None:
            cache.entry = kwargs[self.name] if self.name in kwargs else args[self.position]
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self.cache.state is not None:
            self.cache.decide(output if self.index is None else output[self.index])
        return output


class _Tail(Hook):
    """Last block: stores the residual of a computed step."""

    def __init__(self, cache: BlockCache, blocks: BlockList) -> None:
        super().__init__()
        self.cache = cache
        self.index = blocks.outputs.index(cache.stream) if len(blocks.outputs) > 1 else None

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self.cache.probe is not None:
            self.cache.store(output if self.index is None else output[self.index])
        return output


def pass_through(blocks: BlockList) -> Callable[..., Any]:
    """A stand-in for a block of this list that returns its inputs in the form of its outputs."""
    places = [(name, blocks.inputs.index(name)) for name in blocks.outputs]
    if len(places) == 1:
        [(only, at)] = places
        return lambda *args, **kwargs: kwargs[only] if only in kwargs else args[at]
    return lambda *args, **kwargs: tuple(kwargs[name] if name in kwargs else args[at] for name, at in places)


class BlockCache:
    """A gate, a predictor and guards on one denoiser's block stack. Attach with the constructor, end with `undo`."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        root: RootHook,
        spec: ModelSpec,
        threshold: float,
        guards: Guards,
        gate: Gate,
        predictor: Predictor,
    ) -> None:
        self.name, self.root, self.threshold, self.guards = name, root, threshold, guards
        self.gate, self.predictor = gate, predictor
        self.stream, self.stand_down = spec.stream, spec.stand_down
        self.state: BranchState | None = None
        self.entry: torch.Tensor | None = None  # input of the first block
        self.probe: torch.Tensor | None = None  # its residual, on a step that is being computed
        self.first: torch.Tensor | None = None  # its output, on such a step
        self.answer: torch.Tensor | None = None  # what the last block returns on a reused step
        self.call: Call | None = None
        self.asked: tuple[Run, int] | None = None  # the loop that `sits_out` is about
        self.sits_out = False
        self.skipped: list[tuple[Any, Any]] = []  # (function reference, body) of blocks that sit out this call
        self.links: list[Link] = []
        self.stand_ins: list[Callable[..., Any]] = []
        try:
            self._install(module, spec)
        except BaseException:
            self.undo()
            raise
        root.listeners.append(self)

    def _install(self, module: torch.nn.Module, spec: ModelSpec) -> None:
        blocks = [(block, row) for row in spec.stack for block in getattr(module, row.attribute)]
        last = len(blocks) - 1
        for i, (block, row) in enumerate(blocks):
            hook = _Head(self, row) if i == 0 else _Tail(self, row) if i == last else Hook()
            self.links.append(install(block, hook, self.name, outermost=True))
            stand_in = pass_through(row)
            self.stand_ins.append(self._answering(stand_in, row) if i == last else stand_in)

    def _answering(self, stand_in: Callable[..., Any], row: BlockList) -> Callable[..., Any]:
        """The last block's stand-in: passes other streams through and answers for the one that is read."""
        if len(row.outputs) == 1:
            return lambda *args, **kwargs: self.answer
        at = row.outputs.index(self.stream)

        def answer(*args: Any, **kwargs: Any) -> Any:
            outputs = stand_in(*args, **kwargs)
            return (*outputs[:at], self.answer, *outputs[at + 1 :])

        return answer

    # ---- one denoiser call -----------------------------------------------------------------------------

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run."""
        run = call.run
        states = run.state.get(self.name)
        if states is None or self.threshold <= 0:
            return
        if self.asked != (run, run.loop):  # once per loop; what it depends on does not change inside one
            self.asked, self.sits_out = (run, run.loop), self._sits_out(run)
        if self.sits_out:
            return
        for name in self.stand_down:
            if kwargs.get(name) is not None:
                run.note(
                    f"{self.name} stood down in some calls: {name} was given, which acts on the blocks from outside"
                )
                return
        key = (call.component, call.branch)
        state = states.get(key)
        if state is None:
            state = states[key] = BranchState()
        self.state, self.call = state, call

    def _sits_out(self, run: Run) -> bool:
        reason = stands_down(self.guards, run.total)
        if reason is None and torch.is_grad_enabled():
            reason = "gradients are enabled (wrap the loop in torch.no_grad())"
        if reason is not None:
            run.note(f"{self.name} stood down: {reason}")
        return reason is not None

    def decide(self, first: torch.Tensor) -> None:
        """The first block returned `first` [B, T, C]: reuse the rest, or run it and remember."""
        state, call = self.state, self.call
        assert state is not None and call is not None and self.entry is not None
        probe = first - self.entry
        before = state.probe
        if before is not None and before.shape == probe.shape and before.dtype == probe.dtype:
            run = call.run
            if not must_compute(self.guards, call.step, run.total, state.consecutive):
                call.gate = float(self.gate(probe, before))  # the one host sync of a compared step
                if call.gate < self.threshold:
                    self._skip(first, state, call)
                    return
        self.probe, self.first = probe, first

    def _skip(self, first: torch.Tensor, state: BranchState, call: Call) -> None:
        assert state.residual is not None
        self.answer = self.predictor(first, state.residual)
        state.consecutive += 1
        call.computed = False
        for link, stand_in in zip(self.links[1:], self.stand_ins[1:], strict=True):
            ref = link.hook.fn_ref
            self.skipped.append((ref, ref.forward))
            ref.forward = stand_in

    def store(self, last: torch.Tensor) -> None:
        """The stack ran to its end: `last` [B, T, C] is its output."""
        state, call = self.state, self.call
        assert state is not None and call is not None and self.first is not None
        fresh = state.residual is None
        state.probe, state.residual, state.consecutive = self.probe, last - self.first, 0
        self.probe = self.first = None
        if fresh:
            call.run.bytes_peak += state.bytes()

    def end_call(self, call: Call) -> None:
        """The denoiser returned or raised: give the blocks their forwards back."""
        for ref, body in self.skipped:
            ref.forward = body
        self.skipped.clear()
        self.state = self.call = None
        self.entry = self.probe = self.first = self.answer = None

    # ---- life ------------------------------------------------------------------------------------------

    def bytes_held(self) -> int:
        """Bytes this cache refers to outside of a run's own state."""
        return sum(
            t.numel() * t.element_size() for t in (self.entry, self.probe, self.first, self.answer) if t is not None
        )

    def end_run(self) -> None:
        """Forget the run."""
        self.asked = None

    def relink(self) -> None:
        """Put back what others dropped since the last run; stay outermost."""
        for link in self.links:
            link.relink()

    def undo(self) -> None:
        """Leave the model as it was found."""
        if self in self.root.listeners:
            self.root.listeners.remove(self)
        for link in reversed(self.links):
            link.remove()
        self.links.clear()
