"""A denoiser that adds scripted residuals or gives scripted answers, run through the real engine and its hooks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from diffaccel.caching.build import put_on
from diffaccel.caching.engine import CacheRecipe
from diffaccel.caching.gates.base import ProbeGate
from diffaccel.caching.guards import Guards
from diffaccel.caching.policy import Memory, Policy
from diffaccel.caching.scopes.denoiser import Denoiser
from diffaccel.caching.scopes.stack import Stack
from diffaccel.core.root import install_root
from diffaccel.core.run import Call, Run, running
from diffaccel.models.spec import BlockList, ModelSpec

SPEC = ModelSpec(
    family="scripted",
    denoisers=("transformer",),
    classes=(),
    stack=(BlockList("blocks", ("hidden_states",), ("hidden_states",)),),
    input="latents",
    layout="BCFHW",
    modulated=lambda block, args, kwargs: block.modulated[block.step],
)


class Block(torch.nn.Module):
    """Adds a scripted residual [step, B, T, C] of its own."""

    def __init__(self, residuals: torch.Tensor, modulated: torch.Tensor | None) -> None:
        super().__init__()
        self.residuals, self.modulated, self.step, self.runs = residuals, modulated, 0, 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return hidden_states + self.residuals[self.step]


class Scripted(torch.nn.Module):
    """Blocks one after the other; with `answers` [step, ...] the denoiser's output is scripted, whatever they gave.

    `modulated` [step, ...] is what the first block's norm is said to give.
    """

    def __init__(
        self,
        residuals: Sequence[torch.Tensor] = (),
        modulated: torch.Tensor | None = None,
        answers: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(part, modulated) for part in residuals])
        self.answers, self.step, self.runs = answers, 0, 0

    def at(self, step: int) -> None:
        """What comes next is this step."""
        for module in self.modules():
            module.step = step

    def forward(self, hidden_states: torch.Tensor, latents: torch.Tensor | None = None) -> torch.Tensor:
        self.runs += 1
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states if self.answers is None else self.answers[self.step]


class Owner:
    """Stands for the handle."""


class Driven(NamedTuple):
    """What a scripted loop gave, one entry per step."""

    calls: list[Call]
    memories: list[Memory]  # what the branch remembered after the step
    y: torch.Tensor  # [step, B, T, C]
    model: Scripted
    notes: list[str]

    @property
    def hits(self) -> list[bool]:
        """Which steps were reused."""
        return [not call.computed for call in self.calls]

    @property
    def gates(self) -> list[float | None]:
        """What the gate compared."""
        return [call.gate for call in self.calls]


def halves(residual: torch.Tensor) -> list[torch.Tensor]:
    """A residual as two blocks add it, so that more than one block is skipped."""
    return [residual / 2, residual - residual / 2]


def drive(
    model: Scripted,
    x: torch.Tensor,
    recipe: CacheRecipe,
    latents: torch.Tensor | None = None,
    sigmas: Sequence[float] = (),
) -> Driven:
    """One loop over x [step, B, T, C] through the engine on hooked blocks; nothing of the engine is stubbed.

    `latents` [step, B, C, F, H, W] are the denoiser's main input where given, else x is.
    """
    owner, total = Owner(), len(x)
    root = install_root(model, "transformer", owner)
    engine = put_on("cache.scripted", model, root, SPEC, recipe)
    levels = torch.tensor(list(sigmas), dtype=torch.float64)
    scheduler = SimpleNamespace(timesteps=levels * 1000, sigmas=levels) if len(sigmas) else None
    run = Run(SimpleNamespace(scheduler=scheduler), lambda pipe, call: "cond", owner)
    run.total = total
    states: dict[Any, Any] = {}
    run.state[engine.name] = states
    memories, outputs = [], []
    with running(run), torch.no_grad():
        for t in range(total):
            model.at(t)
            more = {} if latents is None else {"latents": latents[t]}
            outputs.append(model(x[t], **more))
            memories.append(states["transformer", "cond"].memory)
            run.tick(None)
    engine.end_run()
    engine.undo()
    done = Driven(run.calls, memories, torch.stack(outputs), model, run.notes)
    _check_work(done, recipe)
    return done


def _check_work(done: Driven, recipe: CacheRecipe) -> None:
    """What a hit leaves out was left out, and nothing else."""
    total, computed, scope = len(done.calls), done.hits.count(False), recipe.scope
    runs = [block.runs for block in done.model.blocks]
    if isinstance(scope, Denoiser):
        assert done.model.runs == computed and runs == [computed] * len(runs)
    else:
        assert isinstance(scope, Stack) and done.model.runs == total
        skipped = len(runs) - scope.front - scope.back
        assert skipped > 0 and runs == [total] * scope.front + [computed] * skipped + [total] * scope.back


def drive_first_block(
    x: torch.Tensor, front: torch.Tensor, middle: torch.Tensor, threshold: float, guards: Guards
) -> Driven:
    """First-block caching of a front block and a middle that is split over two."""
    recipe = CacheRecipe(Policy(ProbeGate(threshold), guards=guards), Stack(1))
    return drive(Scripted([front, *halves(middle)]), x, recipe)
