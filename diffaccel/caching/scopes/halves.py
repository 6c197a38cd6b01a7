"""The scope `Halves` (Delta-DiT): the residual of one half of the stack is reused, early the rear one's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.options import GOT, number, take
from ...core.run import Call
from ...models.spec import ModelSpec
from ..engine import Engine, Scope
from ..gates.base import IN_BLOCKS
from ..policy import Policy
from .stack import StackHooks, blocks_of


@dataclass(frozen=True)
class Halves(Scope):
    """One half of the block stack: the rear one before step `switch`, the front one from it on (Delta-DiT).

    `switch` is a share of the loop.
    """

    switch: float = 0.5

    def __post_init__(self) -> None:
        take(self, number(0, 1, "a share between 0 and 1"), "switch", form=GOT)

    def unfit(self, policy: Policy, module: torch.nn.Module, spec: ModelSpec) -> str | None:
        """Needs two blocks, and a gate that decides before they run."""
        if not spec.stack:
            return f"{spec.family}: {spec.no_stack}"
        if policy.gate.observes in IN_BLOCKS:
            return "halves of the stack need a gate that decides before the blocks run"
        count = len(blocks_of(module, spec))
        return None if count >= 2 else f"{count} block(s): there are no two halves"

    def left_out(self, module: torch.nn.Module, spec: ModelSpec) -> list[torch.nn.Module]:
        """The rear half, which the early steps leave out."""
        blocks = blocks_of(module, spec)
        return [block for block, _ in blocks[len(blocks) // 2 :]]

    def install(self, engine: Engine) -> HalvesHooks:
        """Hook both halves."""
        return HalvesHooks(engine, self)


class HalvesHooks:
    """Two ranges of blocks, both remembered at every computed step, one of which is skipped at a reused step."""

    def __init__(self, engine: Engine, scope: Halves) -> None:
        self.engine, self.scope = engine, scope
        count = len(blocks_of(engine.module, engine.spec))
        middle = count // 2
        # The ranges meet at one block, which carries a hook of each. The front range's is the outer one and moves
        # outermost by itself, so that a skipped block runs nobody's hooks; the rear's, which only looks, stays inside.
        self.rear = StackHooks(engine, middle, count, label=".rear")
        self.rear.links[0].outermost = False
        try:
            self.front = StackHooks(engine, 0, middle)
        except BaseException:
            self.rear.undo()
            raise
        streams = len(self.front.reads)
        self.front.part, self.rear.part = slice(0, streams), slice(streams, None)
        self.front.sink = self._keep
        self.rear.sink = self._store
        self.front_values: tuple[torch.Tensor, ...] = ()

    def _keep(self, values: tuple[torch.Tensor, ...]) -> None:
        self.front_values = values

    def _store(self, values: tuple[torch.Tensor, ...]) -> None:
        self.engine.store((*self.front_values, *values))

    def skip(self) -> None:
        """Stand in for the rear half before the switch, for the front half from it on."""
        step = self.engine.step
        assert step.total is not None
        (self.rear if step.index < self.scope.switch * step.total else self.front).skip()

    def compute(self) -> None:
        """Nothing is done to a computed call."""

    def release(self, call: Call) -> None:
        """Give the blocks their forwards back."""
        self.front_values = ()
        self.front.release(call)
        self.rear.release(call)

    def relink(self) -> None:
        """Put back what others dropped since the last run; stay outermost."""
        self.rear.relink()
        self.front.relink()

    def undo(self) -> None:
        """Leave the model as it was found."""
        self.front.undo()
        self.rear.undo()
