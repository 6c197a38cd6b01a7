"""First-block caching through the real hooks, against golden values computed from the published formulas."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffaccel.caching.cache import BlockCache
from diffaccel.caching.gates import relative_l1
from diffaccel.caching.guards import Guards
from diffaccel.caching.predictors import reuse
from diffaccel.core.hooks import install_root
from diffaccel.core.run import Run, running
from diffaccel.models.spec import BlockList, ModelSpec

CASES = json.loads((Path(__file__).parent.parent / "data" / "first_block_golden.json").read_text())["cases"]
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


def drive(case: dict[str, Any], threshold: float) -> tuple[list[bool], list[float | None], torch.Tensor, Denoiser]:
    x, front, middle = (torch.tensor(case["inputs"][k], dtype=torch.float64) for k in ("x", "F_res", "M_res"))
    model, owner = Denoiser(front, middle), Owner()
    root = install_root(model, "transformer", owner)
    guards = Guards(min_steps=0, last_steps=0, warmup_steps=case["params"].get("warmup", 0))
    cache = BlockCache("cache.first_block", model, root, SPEC, threshold, guards, relative_l1, reuse)
    run = Run(SimpleNamespace(scheduler=None), lambda pipe, k: "cond", owner)
    run.state[cache.name] = {}
    outputs = []
    with running(run), torch.no_grad():
        for t in range(len(x)):
            for block in model.blocks:
                block.step = t
            outputs.append(model(x[t]))
            run.tick(None)
    hits = [not call.computed for call in run.calls]
    assert model.blocks[1].runs == hits.count(False), "a skipped block does not run"
    assert model.blocks[0].runs == len(x)
    return hits, [call.gate for call in run.calls], torch.stack(outputs), model


@pytest.mark.parametrize("name", sorted(CASES))
def test_golden(name: str) -> None:
    case = CASES[name]
    hits, gates, y, _ = drive(case, case["params"]["threshold"])
    assert hits == case["expected"]["hit"]
    for got, want in zip(gates, case["expected"]["rel_l1"], strict=True):
        assert (got is None) == (want is None) and (want is None or got == pytest.approx(want, abs=1e-6))
    assert torch.allclose(y, torch.tensor(case["expected"]["y"], dtype=torch.float64), atol=1e-6, rtol=0)


def test_another_threshold_gives_another_pattern() -> None:
    """Negative control."""
    case = CASES["fbcache_thr0.08"]
    assert drive(case, 0.12)[0] != case["expected"]["hit"]
