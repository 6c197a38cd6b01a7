"""The scope `Denoiser`: the whole call is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...core.clock import euler_lengths
from ...core.options import GOT, one_of, take, whole
from ...core.run import Call
from ...errors import InvalidOptionError
from ...extrapolation.correction import corrected
from ...extrapolation.forecast import Forecast, Sample
from ...models.spec import ModelSpec
from ..engine import Engine, Scope
from ..gates.base import IN_BLOCKS
from ..observe import as_tensor, batch_of, leading
from ..policy import Policy
from ..step import coordinate
from .stack import Stack, StackHooks, blocks_of, unfit_stack


@dataclass(frozen=True)
class Denoiser(Scope):
    """The whole denoiser: nothing of it runs on a reused step, so embedders and the final layer are left out too.

    What is remembered is its output, or with `residual` output minus input (EasyCache); inputs with more channels
    than the output (image-to-video, inpainting) count with their leading channels, which are the latents. A gate that
    looks at the blocks has them run up to there (`front` blocks), and the final layer as well. `correct` of 1 to 3
    is the order with which a computed step makes good what forecasts before it missed (`correction.corrected`):
    for Euler schedulers, at most one above the forecast's own order.
    """

    residual: bool = False
    front: int = 0
    correct: int = 0
    takes_samples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        take(self, whole(0), "front", form=GOT)
        take(self, one_of(0, 1, 2, 3), "correct", form=GOT)
        if self.correct and self.residual:
            raise InvalidOptionError("correct is for forecasts of the output, not of its residual")

    def correction(self) -> int:
        """The order given as `correct`."""
        return self.correct

    def looks_inside(self, policy: Policy) -> bool:
        """Only with a gate that looks at blocks."""
        return policy.gate.observes in IN_BLOCKS

    def unfit(self, policy: Policy, module: torch.nn.Module, spec: ModelSpec) -> str | None:
        """Any denoiser will do, unless the gate looks at blocks."""
        if self.correct > policy.predictor.depth:
            return f"correct={self.correct} needs a forecast of order {self.correct - 1} or more"
        return unfit_stack(self.front, 0, policy, module, spec) if policy.gate.observes in IN_BLOCKS else None

    def left_out(self, module: torch.nn.Module, spec: ModelSpec) -> list[torch.nn.Module]:
        """The denoiser, or its blocks behind the front ones where a gate looks at those."""
        return [module] if self.front == 0 else Stack(self.front).left_out(module, spec)

    def install(self, engine: Engine) -> DenoiserHooks:
        """Answer whole calls."""
        return DenoiserHooks(engine, self)


class DenoiserHooks:
    """Answers in the denoiser's stead: the forecast output, or input + forecast of (output - input).

    Where the gate looks at blocks, the call is under way when it decides: what is left of the stack hands its input
    through, and the denoiser's answer is replaced at the end.
    """

    def __init__(self, engine: Engine, scope: Denoiser) -> None:
        self.engine, self.scope = engine, scope
        self.watch: StackHooks | None = None
        if not engine.at_root:
            count = len(blocks_of(engine.module, engine.spec))
            self.watch = StackHooks(engine, scope.front, count, watch=True)

    def compute(self) -> None:
        """The call is computed; with `correct`, its output will make good what forecasts before it missed."""
        branch, call = self.engine.branch, self.engine.call
        assert branch is not None and call is not None
        if self.engine.recipe.per_sample:
            self._then(call, self._mix)
        if self.scope.correct and branch.missed:
            self._then(call, self._correct)

    def _then(self, call: Call, change: Callable[[Any], Any]) -> None:
        """Change the output before anybody else does."""
        outer = call.finish
        call.finish = change if outer is None else (lambda output: outer(change(output)))

    def _mix(self, output: Any) -> Any:
        """Samples that are reused at a computed step get their forecasts."""
        answers = self.engine.answers()
        if not answers:
            return output
        tensors, repack = self._tensors(output)
        whole = [tensor.clone() for tensor in tensors]
        base = self._base(tensors)
        for rows, forecast in answers:
            for tensor, said in zip(whole, forecast, strict=True):
                tensor[rows] = (said if base is None else base[rows] + said).to(tensor.dtype)
        return repack(whole)

    def _base(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """The latents of the input, where output minus input is what is remembered."""
        return leading(as_tensor(self.engine.main), tensors[0]) if self.scope.residual and len(tensors) == 1 else None

    def _tensors(self, output: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
        return batch_of(output, self.engine.spec.layout)

    def _correct(self, output: Any) -> Any:
        engine, branch = self.engine, self.engine.branch
        assert branch is not None and engine.call is not None
        run, missed, forecast = engine.call.run, branch.missed, branch.policy.predictor
        lengths = euler_lengths(run.scheduler, run.schedule()[1])
        if lengths is None and run.sampler is not None:  # the sampler goes back instead, or says why not
            return output
        if lengths is None or not isinstance(forecast, Forecast):
            name = type(run.scheduler).__name__
            run.note(f"{engine.name} left out its correction: {name} does not simply add the denoiser's output")
            return output
        tensors, repack = self._tensors(output)
        now = Sample(coordinate(engine.step, forecast.coordinate), tuple(tensors))
        spans = {at: lengths[index] for index, at in missed}
        return repack(
            corrected(branch.memory.history, now, spans, lengths[engine.step.index], forecast, self.scope.correct)
        )

    def skip(self) -> None:
        """Answer the call with the forecast."""
        call, branch = self.engine.call, self.engine.branch
        assert call is not None and branch is not None
        if self.scope.correct:
            step = self.engine.step
            at = coordinate(step, branch.policy.predictor.coordinate)
            branch.missed = (*branch.missed, (step.index, at))
        if self.watch is None or self.watch.x is None:
            call.answer = self._answer()
        else:
            answer = self._answer()
            self.watch.skip()
            self._then(call, lambda output: answer)

    def _answer(self) -> Any:
        branch = self.engine.branch
        assert branch is not None
        forecast = list(self.engine.forecast())
        repack, residual, dtypes = branch.template
        if residual:
            base = leading(as_tensor(self.engine.main), forecast[0])
            assert base is not None
            forecast[0] = base + forecast[0]
        return repack([value.to(dtype) for value, dtype in zip(forecast, dtypes, strict=True)])

    def release(self, call: Call) -> None:
        """Remember a computed output."""
        engine, branch = self.engine, self.engine.branch
        if self.watch is not None:
            self.watch.release(call)
        if not engine.computing or call.output is None or branch is None:
            return
        tensors, repack = self._tensors(call.output)
        dtypes = [tensor.dtype for tensor in tensors]  # what is remembered may be wider
        base = self._base(tensors)
        if base is not None:
            tensors = [tensors[0] - base]
        branch.missed = ()
        branch.template = (repack, base is not None, dtypes)
        engine.store(tuple(tensors))

    def relink(self) -> None:
        """Put back what others dropped since the last run."""
        if self.watch is not None:
            self.watch.relink()

    def undo(self) -> None:
        """Leave the model as it was found."""
        if self.watch is not None:
            self.watch.undo()
