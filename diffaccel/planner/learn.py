"""Learn the blocks of a denoiser without a card from the first run, so that the next plan can use them.

Rides along as an edit that changes nothing: the first two calls of the denoiser are recorded (`trace.record`), and
what `infer` makes of them is remembered with the module (`registry.remember`): a spec, or a refusal that says what
was seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ..core.compat import unwrap_module
from ..core.listener import Listener
from ..core.run import Call, Run
from ..models.infer import infer
from ..models.registry import UNKNOWN, learned, remember
from ..models.trace import Trace, record

if TYPE_CHECKING:
    from ..core.compat import Args, Kwargs

CALLS = 2  # the second call must tell the same story as the first


@dataclass(frozen=True)
class LearnBlocks:
    """Record two calls of an unknown denoiser. Exact; gone once it has its answer."""

    name: ClassVar[str] = "model.blocks"
    slot: ClassVar[Slot] = Slot.CALL
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT

    def check(self, target: Target) -> Verdict:
        """Is there anything left to learn?"""
        spec = target.spec
        if spec.family != UNKNOWN or not spec.denoisers:
            return Verdict.no("the model has a card")
        if learned(getattr(target.pipe, spec.denoisers[0])) is not None:
            return Verdict.no("the model's blocks were looked at before")
        return Verdict.yes()

    def predict(self, target: Target) -> Mapping[str, object]:
        """Nothing."""
        return {"origin": "unmeasured"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Listen to the denoiser's calls; nothing of the model is edited."""
        roots = {name: root for name, root in site.roots.items() if name in target.spec.denoisers}
        alike = [getattr(target.pipe, name) for name in roots]  # of one class: what one shows holds for all of them
        pupils = [_Pupil(getattr(target.pipe, name), name, alike) for name in roots]
        stops = [root.add(pupil, site.rank) for pupil, root in zip(pupils, roots.values(), strict=True)]

        def undo() -> None:
            for pupil, stop_listening in zip(pupils, stops, strict=True):
                pupil.stop()
                stop_listening()

        def finish(run: Run) -> None:
            for pupil in pupils:
                pupil.finish(run)

        return Edit(self.name, undo, end_run=finish)


class _Pupil(Listener):
    def __init__(self, module: torch.nn.Module, component: str, alike: Sequence[torch.nn.Module]) -> None:
        self.module, self.component, self.alike = module, component, alike
        self.recording = contextlib.ExitStack()
        self.trace: Trace | None = None

    def begin_call(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """Record this call, unless enough were recorded."""
        if learned(self.module) is None and self.trace is None:
            self.trace = self.recording.enter_context(record(self.module))

    def end_call(self, call: Call) -> None:
        """Stop once there is enough."""
        if self.trace is not None and (self.trace.note or len(self.trace.calls) >= CALLS):
            self.stop()

    def stop(self) -> None:
        """Leave the module as it was."""
        self.recording.close()

    def finish(self, run: Run) -> None:
        """The run is over: what did it show?"""
        self.stop()
        trace, self.trace = self.trace, None
        if trace is not None and (trace.note or len(trace.calls) >= CALLS):
            found = infer(trace, self.component)
            for module in self.alike:
                remember(unwrap_module(module), found)
            run.note(f"the blocks of {trace.model} were learnt in this run: the plan is made anew before the next")
