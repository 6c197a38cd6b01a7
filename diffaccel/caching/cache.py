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

from ..core.compat import eager
from ..core.hooks import Hook, Link, RootHook, install
from ..core.run import Call, Run
from ..models.spec import BlockList, ModelSpec
from .guards import Guards, must_compute, stands_down

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Predictor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class BranchState:
    """What one guidance branch of one denoiser remembers: [B, T, C] tensors of the last computed step."""

    __slots__ = ("consecutive", "probe", "residuals")

    def __init__(self) -> None:
        self.probe: torch.Tensor | None = None  # residual of the first block, main stream
        self.residuals: tuple[torch.Tensor, ...] = ()  # residual of all other blocks, per stream that is read
        self.consecutive = 0

    def bytes(self) -> int:
        """Bytes of the stored tensors."""
        return _bytes((self.probe, *self.residuals))


def _bytes(tensors: tuple[torch.Tensor | None, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class _Head(Hook):
    """First block: takes the probe and decides."""

    def __init__(self, cache: BlockCache, blocks: BlockList) -> None:
        super().__init__()
        self.cache, self.outputs = cache, blocks.outputs
        self.position, self.name = blocks.inputs.index(cache.stream), cache.stream

    @eager
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = self.cache
        if cache.state is not None:
            cache.entry = kwargs[self.name] if self.name in kwargs else args[self.position]
        return args, kwargs

    @eager
    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self.cache.state is not None:
            values = output if len(self.outputs) > 1 else (output,)
            self.cache.decide(dict(zip(self.outputs, values, strict=True)))
        return output


class _Tail(Hook):
    """Last block: stores the residual of a computed step."""

    def __init__(self, cache: BlockCache, blocks: BlockList) -> None:
        super().__init__()
        self.cache, self.outputs = cache, blocks.outputs

    @eager
    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self.cache.probe is not None:
            values = output if len(self.outputs) > 1 else (output,)
            self.cache.store(dict(zip(self.outputs, values, strict=True)))
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
        self.stream, self.reads, self.stand_down = spec.stream, spec.reads or (spec.stream,), spec.stand_down
        self.state: BranchState | None = None
        self.entry: torch.Tensor | None = None  # input of the first block
        self.probe: torch.Tensor | None = None  # its residual, on a step that is being computed
        self.first: tuple[torch.Tensor, ...] = ()  # its outputs as the last block would see them, on such a step
        self.answers: dict[str, torch.Tensor] = {}  # what the last block returns on a reused step
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
        self.joins = blocks[-1][1].joins if blocks[0][1] is not blocks[-1][1] else ()
        last = len(blocks) - 1
        for i, (block, row) in enumerate(blocks):
            hook = _Head(self, row) if i == 0 else _Tail(self, row) if i == last else Hook()
            self.links.append(install(block, hook, self.name, outermost=True))
            self.stand_ins.append(self._answering(row) if i == last else pass_through(row))

    def _answering(self, row: BlockList) -> Callable[..., Any]:
        """The last block's stand-in: answers for the streams that are read, passes the others through."""
        if len(row.outputs) == 1:
            [only] = row.outputs
            return lambda *args, **kwargs: self.answers[only]
        places = [(name, row.inputs.index(name)) for name in row.outputs]

        def answer(*args: Any, **kwargs: Any) -> Any:
            return tuple(
                self.answers[name] if name in self.answers else kwargs[name] if name in kwargs else args[at]
                for name, at in places
            )

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

    @eager
    def decide(self, outputs: dict[str, torch.Tensor]) -> None:
        """The first block returned its streams, each [B, T, C]: reuse the rest, or run it and remember."""
        state, call = self.state, self.call
        assert state is not None and call is not None and self.entry is not None
        probe = outputs[self.stream] - self.entry
        before = state.probe
        first: tuple[torch.Tensor, ...]
        if self.joins:
            first = (torch.cat([outputs[name] for name in self.joins], dim=1),)
        else:
            first = tuple([outputs[name] for name in self.reads])
        if before is not None and before.shape == probe.shape and before.dtype == probe.dtype:
            run = call.run
            if not must_compute(self.guards, call.step, run.total, state.consecutive):
                call.gate = float(self.gate(probe, before))  # the one host sync of a compared step
                if call.gate < self.threshold:
                    self._skip(first, state, call)
                    return
        self.probe, self.first = probe, first

    @eager
    def _skip(self, first: tuple[torch.Tensor, ...], state: BranchState, call: Call) -> None:
        for name, entry, residual in zip(self.reads, first, state.residuals, strict=True):
            self.answers[name] = self.predictor(entry, residual)
        state.consecutive += 1
        call.computed = False
        for link, stand_in in zip(self.links[1:], self.stand_ins[1:], strict=True):
            ref = link.hook.fn_ref
            self.skipped.append((ref, ref.forward))
            ref.forward = stand_in

    @eager
    def store(self, outputs: dict[str, torch.Tensor]) -> None:
        """The stack ran to its end; `outputs` are the last block's streams, each [B, T, C]."""
        state, call = self.state, self.call
        assert state is not None and call is not None
        fresh = state.probe is None
        state.residuals = tuple([outputs[name] - entry for name, entry in zip(self.reads, self.first, strict=True)])
        state.probe, state.consecutive = self.probe, 0
        self.probe, self.first = None, ()
        if fresh:
            call.run.bytes_peak += state.bytes()

    def end_call(self, call: Call) -> None:
        """The denoiser returned or raised: give the blocks their forwards back."""
        for ref, body in self.skipped:
            ref.forward = body
        self.skipped.clear()
        self.state = self.call = self.entry = self.probe = None
        self.first, self.answers = (), {}

    # ---- life ------------------------------------------------------------------------------------------

    def bytes_held(self) -> int:
        """Bytes this cache refers to outside of a run's own state."""
        return _bytes((self.entry, self.probe, *self.first, *self.answers.values()))

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
