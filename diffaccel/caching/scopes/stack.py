"""The scope `Stack`: a range of consecutive blocks whose residual is remembered.

On a reused step the blocks of the range hand their inputs through, and the last of them returns
`what the block before the range gave + the forecast residual`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...core.chain import Hook, Link, install
from ...core.compat import eager
from ...core.options import GOT, take, whole
from ...core.run import Call
from ...models.spec import BlockList, ModelSpec
from ..engine import Engine, Scope
from ..gates.base import MODULATED, PAIR, PROBE
from ..policy import ALL, Policy
from .stand_ins import StandIns

Streams = dict[str, torch.Tensor]


def blocks_of(module: torch.nn.Module, spec: ModelSpec) -> list[tuple[torch.nn.Module, BlockList]]:
    """Every block of the stack with its card row, in running order."""
    return [(block, row) for row in spec.stack for block in getattr(module, row.attribute)]


def inputs_of(row: BlockList, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Streams:
    """The streams that enter a block, by name."""
    return {name: kwargs[name] if name in kwargs else args[i] for i, name in enumerate(row.inputs)}


def pass_through(row: BlockList) -> Callable[..., Any]:
    """A stand-in for a block of this list that returns its inputs in the form of its outputs."""
    places = [(name, row.inputs.index(name)) for name in row.outputs]
    if len(places) == 1:
        [(only, at)] = places
        return lambda *args, **kwargs: kwargs[only] if only in kwargs else args[at]
    return lambda *args, **kwargs: tuple(kwargs[name] if name in kwargs else args[at] for name, at in places)


@dataclass(frozen=True)
class Stack(Scope):
    """The block stack, but for `front` blocks at its start and `back` blocks at its end, which always run.

    What is remembered is the residual of the blocks between, per stream, [B, T, C]; it is added to what the front
    blocks give at the step at hand. Gates that look at a probe need at least one front block.
    """

    front: int = 0
    back: int = 0
    takes_samples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        take(self, whole(0), "front", "back", form=GOT)

    def unfit(self, policy: Policy, module: torch.nn.Module, spec: ModelSpec) -> str | None:
        """Needs blocks between the front ones and the back ones."""
        return unfit_stack(self.front, self.back, policy, module, spec)

    def left_out(self, module: torch.nn.Module, spec: ModelSpec) -> list[torch.nn.Module]:
        """The blocks between."""
        blocks = blocks_of(module, spec)
        return [block for block, _ in blocks[self.front : len(blocks) - self.back]]

    def install(self, engine: Engine) -> StackHooks:
        """Hook the blocks."""
        return StackHooks(engine, self.front, len(blocks_of(engine.module, engine.spec)) - self.back)


BEHIND_FIRST_BLOCK = Stack(1)


def unfit_stack(front: int, back: int, policy: Policy, module: torch.nn.Module, spec: ModelSpec) -> str | None:
    """Why the blocks between `front` and `back` ones cannot be left out under this policy, or None."""
    if not spec.stack:
        return f"{spec.family}: {spec.no_stack}"
    if policy.gate.observes in (PROBE, PAIR) and front < 1:
        return "a gate that looks at a probe needs at least one front block"
    count = len(blocks_of(module, spec))
    if front + back >= count:
        always = f"{front} front and {back} back block(s)" if back else f"{front} front block(s)"
        return f"{count} block(s), of which {always} always run: nothing would be left to skip"
    edge = len(getattr(module, spec.stack[0].attribute))
    if front > edge and any(row.joins for row in spec.stack):
        return f"front={front} reaches beyond the {edge} {spec.stack[0].attribute}, where the streams are joined"
    return None


class _BlockObserver(Hook):
    """A block at which the engine looks: the first of the model, the last before the range, the last of the range.

    Written out in two functions, as every Python call here is one more per step.
    """

    def __init__(self, hooks: StackHooks, row: BlockList, enter: bool, front: bool, tail: bool) -> None:
        super().__init__()
        self.hooks, self.row, self.enter, self.front, self.tail = hooks, row, enter, front, tail
        self.main, self.alone = hooks.engine.spec.stream, len(row.outputs) == 1

    @eager
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        hooks, engine = self.hooks, self.hooks.engine
        if self.enter and engine.branch is not None:
            hooks.x = kwargs[self.main] if self.main in kwargs else args[self.row.inputs.index(self.main)]
            if hooks.padded:
                engine.cut_tokens(hooks.x.shape[1])
            if hooks.start == 0:
                hooks.entry = hooks.entry_of(inputs_of(self.row, args, kwargs))
            if engine.deciding and engine.recipe.policy.gate.observes == MODULATED:
                assert engine.spec.modulated is not None
                engine.decide(engine.spec.modulated(module, args, kwargs))
        return args, kwargs

    @eager
    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        hooks, engine = self.hooks, self.hooks.engine
        if engine.branch is None or not (self.front or (self.tail and engine.computing)):
            return output
        streams = {self.row.outputs[0]: output} if self.alone else dict(zip(self.row.outputs, output, strict=True))
        if self.front:
            hooks.entry = hooks.entry_of(streams) if hooks.joins else tuple(map(streams.__getitem__, hooks.reads))
            if hooks.padded:
                engine.cut_tokens(hooks.entry[0].shape[1])
            if engine.deciding:
                assert hooks.x is not None
                y = streams[self.main]
                engine.decide((y, hooks.x) if engine.recipe.policy.gate.observes == PAIR else y - hooks.x)
        else:
            values = tuple(map(torch.sub, map(streams.__getitem__, hooks.reads), hooks.entry))
            if engine.recipe.per_sample:
                output = hooks.mixed(streams, output)
            hooks.sink(values)
        return output


class StackHooks(StandIns):
    """Blocks `start` to `stop` (exclusive) are skipped on a reused step.

    `part` is where this range's streams lie in what the engine remembers. With `watch` it only shows the gate
    what it looks at, and remembers nothing.
    """

    def __init__(
        self, engine: Engine, start: int, stop: int, label: str = "", part: slice = ALL, watch: bool = False
    ) -> None:
        super().__init__()
        self.engine, self.name = engine, engine.name + label
        self.start, self.stop, self.part, self.watch = start, stop, part, watch
        blocks = blocks_of(engine.module, engine.spec)
        self.first, self.last = blocks[0][1], blocks[stop - 1][1]
        before = blocks[start - 1][1] if start else self.first
        self.joins = self.last.joins if before is not self.last else ()
        spec = engine.spec
        self.reads = self.last.outputs if stop < len(blocks) else spec.reads or (spec.stream,)
        self.padded = spec.layout == "list"  # pictures of a batch are padded to the longest caption
        self.sink: Callable[[tuple[torch.Tensor, ...]], None] = engine.store
        self.x: torch.Tensor | None = None  # the main stream as it enters the stack
        self.entry: tuple[torch.Tensor, ...] = ()  # what enters the range, per stream that is read
        self.stand_ins: list[tuple[Link, Callable[..., Any]]] = []
        try:
            self._install(blocks)
        except BaseException:
            self.undo()
            raise

    def _install(self, blocks: list[tuple[torch.nn.Module, BlockList]]) -> None:
        last = self.stop - 1
        needs_x = self.start == 0 or not self.engine.at_root
        for i, (block, row) in enumerate(blocks):
            enter, front, tail = i == 0 and needs_x, i == self.start - 1, i == last and not self.watch
            inside = self.start <= i < self.stop
            if enter or front or tail:
                link = install(block, _BlockObserver(self, row, enter, front, tail), self.name, outermost=True)
            elif inside:
                link = install(block, Hook(), self.name, outermost=True)
            else:
                continue
            self.links.append(link)
            if inside:
                self.stand_ins.append((link, self._answering(row) if tail else pass_through(row)))

    def _answering(self, row: BlockList) -> Callable[..., Any]:
        """The last block's stand-in: answers for the streams that are read, passes the others through."""
        if len(row.outputs) == 1:
            return lambda *args, **kwargs: self._answers()[0]
        places = [(name, row.inputs.index(name)) for name in row.outputs]

        def answer(*args: Any, **kwargs: Any) -> Any:
            answers = dict(zip(self.reads, self._answers(), strict=True))
            return tuple(
                answers[name] if name in answers else kwargs[name] if name in kwargs else args[at]
                for name, at in places
            )

        return answer

    @eager
    def _answers(self) -> tuple[torch.Tensor, ...]:
        forecast = self.engine.forecast(self.part)
        return tuple([(a + b).to(a.dtype) for a, b in zip(self.entry, forecast, strict=True)])

    def entry_of(self, streams: Streams) -> tuple[torch.Tensor, ...]:
        """What enters the range, as the streams that leave it are named."""
        if self.joins:
            return (torch.cat([streams[name] for name in self.joins], dim=1),)
        return tuple([streams[name] for name in self.reads])

    def mixed(self, streams: Streams, output: Any) -> Any:
        """The last block's output, with the forecasts of the samples that are reused at a computed step."""
        answers = self.engine.answers()
        if not answers:
            return output
        new = streams | {name: streams[name].clone() for name in self.reads}
        for rows, forecast in answers:
            for name, entry, residual in zip(self.reads, self.entry, forecast, strict=True):
                new[name][rows] = (entry[rows] + residual).to(entry.dtype)
        several = tuple(new[name] for name in self.last.outputs)
        return several if len(several) > 1 else several[0]

    # ---- a call ----------------------------------------------------------------------------------------

    @eager
    def skip(self) -> None:
        """Stand in for the range."""
        for link, stand_in in self.stand_ins:
            self.stand_in(link, stand_in)

    def release(self, call: Call) -> None:
        """Give the blocks their forwards back."""
        if self.skipped:  # asked here, as every Python call of a computed step counts
            self.put_back()
        self.x, self.entry = None, ()
