"""The tap of the scope `Denoiser`: the whole call is answered."""

from __future__ import annotations

from typing import Any

import torch

from ..core.compat import leaves
from ..core.run import Call
from .engine import Engine
from .scopes import Denoiser
from .sights import as_tensor, leading
from .stack_tap import StackTap, blocks_of


class DenoiserTap:
    """Answers in the denoiser's stead: the forecast output, or input + forecast of (output - input).

    Where the gate looks at blocks, the call is under way when it decides: what is left of the stack hands its input
    through, and the denoiser's answer is replaced at the end.
    """

    def __init__(self, engine: Engine, scope: Denoiser) -> None:
        self.engine, self.scope = engine, scope
        self.watch: StackTap | None = None
        if not engine.at_root:
            count = len(blocks_of(engine.module, engine.spec))
            self.watch = StackTap(engine, scope.front, count, watch=True)

    def skip(self) -> None:
        """Answer the call with the forecast."""
        call = self.engine.call
        assert call is not None
        if self.watch is None or self.watch.x is None:
            call.answer = self._answer()
        else:
            answer = self._answer()
            self.watch.skip()
            outer = call.finish
            call.finish = (lambda output: answer) if outer is None else (lambda output: outer(answer))

    def _answer(self) -> Any:
        branch = self.engine.branch
        assert branch is not None
        forecast = list(self.engine.forecast())
        repack, residual = branch.template
        if residual:
            base = leading(as_tensor(self.engine.main), forecast[0])
            assert base is not None
            forecast[0] = (base + forecast[0]).to(base.dtype)
        return repack(forecast)

    def release(self, call: Call) -> None:
        """Remember a computed output."""
        engine, branch = self.engine, self.engine.branch
        main = engine.main
        if self.watch is not None:
            self.watch.release(call)
        if not engine.computing or call.output is None or branch is None:
            return
        tensors, repack = leaves(call.output)
        base = None
        if self.scope.residual and len(tensors) == 1 and isinstance(main, torch.Tensor):
            base = leading(main, tensors[0])
        if base is not None:
            tensors = [tensors[0] - base]
        branch.template = (repack, base is not None)
        engine.store(tuple(tensors))

    def relink(self) -> None:
        """Put back what others dropped since the last run."""
        if self.watch is not None:
            self.watch.relink()

    def undo(self) -> None:
        """Leave the model as it was found."""
        if self.watch is not None:
            self.watch.undo()
