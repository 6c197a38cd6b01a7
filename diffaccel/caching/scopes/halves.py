"""The tap of the scope `Halves` (Delta-DiT): the residual of one half of the stack is reused, early the rear one's."""

from __future__ import annotations

import torch

from ...core.run import Call
from ..engine import Engine
from .config import Halves
from .stack import StackTap, blocks_of


class HalvesTap:
    """Two ranges of blocks, both remembered at every computed step, one of which is skipped at a reused step."""

    def __init__(self, engine: Engine, scope: Halves) -> None:
        self.engine, self.scope = engine, scope
        count = len(blocks_of(engine.module, engine.spec))
        middle = count // 2
        # The ranges meet at one block, which carries a hook of each. The front range's is the outer one and moves
        # outermost by itself, so that a skipped block runs nobody's hooks; the rear's, which only looks, stays inside.
        self.rear = StackTap(engine, middle, count, label=".rear")
        self.rear.links[0].outermost = False
        try:
            self.front = StackTap(engine, 0, middle)
        except BaseException:
            self.rear.undo()
            raise
        streams = len(self.front.reads)
        self.front.part, self.rear.part = slice(0, streams), slice(streams, None)
        self.front.sink = self._keep
        self.rear.sink = self._store
        self.kept: tuple[torch.Tensor, ...] = ()

    def _keep(self, values: tuple[torch.Tensor, ...]) -> None:
        self.kept = values

    def _store(self, values: tuple[torch.Tensor, ...]) -> None:
        self.engine.store((*self.kept, *values))

    def skip(self) -> None:
        """Stand in for the rear half before the switch, for the front half from it on."""
        step = self.engine.step
        assert step.total is not None
        (self.rear if step.index < self.scope.switch * step.total else self.front).skip()

    def compute(self) -> None:
        """Nothing is done to a computed call."""

    def release(self, call: Call) -> None:
        """Give the blocks their forwards back."""
        self.kept = ()
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
