"""A denoiser whose blocks add scripted residuals, run through the real hooks of a block cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch

from diffaccel.caching.build import put_on
from diffaccel.caching.engine import Recipe
from diffaccel.caching.gates import ProbeGate
from diffaccel.caching.guards import Guards
from diffaccel.caching.policy import Policy
from diffaccel.caching.scopes import Stack
from diffaccel.core.hooks import install_root
from diffaccel.core.run import Run, running
from diffaccel.models.spec import BlockList, ModelSpec

SPEC = ModelSpec(
    family="scripted",
    denoisers=("transformer",),
    classes=(),
    stack=(BlockList("blocks", ("hidden_states",), ("hidden_states",)),),
)


class Block(torch.nn.Module):
    """Adds a scripted residual [step, B, T, C] of its own."""

    def __init__(self, residuals: torch.Tensor) -> None:
        super().__init__()
        self.residuals, self.step, self.runs = residuals, 0, 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return hidden_states + self.residuals[self.step]


class Denoiser(torch.nn.Module):
    """A front block and a middle that is split over two blocks."""

    def __init__(self, front: torch.Tensor, middle: torch.Tensor) -> None:
        super().__init__()
        half = middle / 2
        self.blocks = torch.nn.ModuleList([Block(front), Block(half), Block(middle - half)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


class Owner:
    """Stands for the handle."""


class Driven(NamedTuple):
    """What a scripted loop gave, one entry per step."""

    hits: list[bool]
    gates: list[float | None]
    y: torch.Tensor  # [step, B, T, C]
    model: Denoiser


def drive(x: torch.Tensor, front: torch.Tensor, middle: torch.Tensor, threshold: float, guards: Guards) -> Driven:
    """One loop over x [step, B, T, C] through the engine on hooked blocks; nothing of the hooks is stubbed."""
    model, owner = Denoiser(front, middle), Owner()
    root = install_root(model, "transformer", owner)
    engine = put_on(
        "cache.first_block", model, root, SPEC, Recipe(Policy(ProbeGate(threshold), guards=guards), Stack(1))
    )
    run = Run(SimpleNamespace(scheduler=None), lambda pipe, k: "cond", owner)
    run.total = len(x)
    run.state[engine.name] = {}
    outputs = []
    with running(run), torch.no_grad():
        for t in range(len(x)):
            for block in model.blocks:
                block.step = t
            outputs.append(model(x[t]))
            run.tick(None)
    hits = [not call.computed for call in run.calls]
    assert model.blocks[1].runs == hits.count(False), "a skipped block does not run"
    assert model.blocks[0].runs == len(x), "the first block always runs"
    return Driven(hits, [call.gate for call in run.calls], torch.stack(outputs), model)
