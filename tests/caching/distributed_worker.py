"""One member of a process group at scripted loops: python -m tests.caching.distributed_worker RANK WORLD STORE.

Prints one JSON line: for every gate the hits alone and in the group. Between the members, what the gates look at
changes differently, so that alone they would decide differently.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler

from diffaccel.caching.engine import CacheRecipe, Scope
from diffaccel.caching.gates.adacache import RatesGate
from diffaccel.caching.gates.base import Gate, ProbeGate
from diffaccel.caching.gates.dicache import ProbeSumGate
from diffaccel.caching.gates.easycache import RateGate
from diffaccel.caching.gates.seacache import SpectralGate
from diffaccel.caching.gates.teacache import PolynomialGate
from diffaccel.caching.guards import Guards
from diffaccel.caching.policy import Policy
from diffaccel.caching.scopes.denoiser import Denoiser
from diffaccel.caching.scopes.stack import Stack
from diffaccel.caching.steering import Controller, StepRules
from diffaccel.core.clock import schedule_of
from diffaccel.extrapolation.forecast import Sample
from diffaccel.extrapolation.step_control import Levels, StepControl
from diffaccel.solvers.adams import Adams
from diffaccel.solvers.control import Control
from diffaccel.solvers.levels import ode_of
from diffaccel.solvers.sampler import Rules, Solver, Stand
from tests.caching.scripted import Driven, Scripted, drive, halves

STEPS = 10
RECIPES: dict[str, tuple[Gate[Any], Scope]] = {
    "adacache": (RatesGate(((0.1, 4), (1.0, 1))), Stack(0)),
    "dicache": (ProbeSumGate(0.1), Stack(1)),
    "easycache": (RateGate(0.1), Denoiser(residual=True)),
    "first_block": (ProbeGate(0.1), Stack(1)),
    "seacache": (SpectralGate(0.1), Stack(0)),
    "teacache": (PolynomialGate(0.1), Stack(0)),
}


LOUD = ((1, 5), (3,))  # of each member, the steps into which its values jump


def series(rank: int) -> torch.Tensor:
    """[STEPS, B, T, C] that grows by 4 % a step, and by 15 % into the loud ones."""
    value, found = 1.0, []
    for t in range(STEPS):
        value *= 1.15 if t in LOUD[rank] else 1.04
        found.append(value)
    return torch.tensor(found, dtype=torch.float64)[:, None, None, None] * torch.linspace(1, 2, 12).reshape(1, 3, 4)


def run(name: str, rank: int, group: Any) -> Driven:
    """One loop of one gate on this member's values."""
    gate, scope = RECIPES[name]
    values = series(rank)
    recipe = CacheRecipe(Policy(gate, guards=Guards(last_steps=1)), scope, process_group=group)
    if isinstance(scope, Denoiser):
        return drive(Scripted(answers=values * 1.5), values, recipe)
    model = Scripted([values, *halves(values)], modulated=values)
    if name == "seacache":
        grids = values.reshape(STEPS, 1, 3, 1, 2, 2)
        return drive(model, torch.zeros_like(values), recipe, grids, [0.5] * STEPS)
    return drive(model, torch.zeros_like(values), recipe)


def steered(rank: int, group: Any) -> list[bool]:
    """One loop of step control on this member's values, by the controller that pipelines have."""
    values, marks = series(rank), [False]
    controller = Controller("steered", StepRules(0.005, process_group=group))
    controller.levels = Levels(tuple(1 - i / STEPS for i in range(STEPS)), (1 / STEPS,) * STEPS)
    control = StepControl(0.005)
    track = control.begin(Sample(1.0, (values[0],)), 0)
    for index in range(1, STEPS):
        marks.append(index < track.upto)
        if not marks[-1]:
            found = controller.misses(control, [track], values[index], [slice(None)], [False], index)
            now = Sample(controller.levels.at[index], (values[index],))
            track = control.advance(track, now, index, controller.levels, found[0])
    return marks


def levels(rank: int, group: Any) -> list[float]:
    """The noise levels that a solver chooses on this member's misses, until it comes to the end."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3 * STEPS)
    solver = Solver("solver", Rules(Adams(), control=Control(0.1), process_group=group))
    stand = Stand(0, ode_of(scheduler, *schedule_of(scheduler)))
    for index in range(3 * STEPS):
        run: Any = SimpleNamespace(scheduler=scheduler, step=index, begin=0, copies=0)
        bends = 0.02 + 0.2 * ((index % 4 == 0) if rank else (index % 3 == 0))
        found = torch.tensor([[bends]] * min(index, 3)).reshape(-1, 1)
        assert stand.ode is not None
        stand = solver._choose(run, stand, stand.ode, found)
        if stand.ended == index + 1 or (stand.ode is not None and stand.ode.at[index + 1] == 0):
            break
    assert stand.ode is not None
    return list(stand.ode.at)


def main(rank: int, world: int, store: str) -> None:
    """Alone, then together."""
    alone = {name: run(name, rank, None).hits for name in RECIPES} | {"adaptive": steered(rank, None)}
    alone_levels = levels(rank, None)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=240)
    )
    together = {name: run(name, rank, dist.group.WORLD) for name in RECIPES}
    together_steered, together_levels = steered(rank, dist.group.WORLD), levels(rank, dist.group.WORLD)
    dist.destroy_process_group()
    print(
        json.dumps(
            {
                "alone": alone,
                "together": {name: done.hits for name, done in together.items()} | {"adaptive": together_steered},
                "gates": {name: done.gates for name, done in together.items()},
                "levels": {"alone": alone_levels, "together": together_levels},
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
