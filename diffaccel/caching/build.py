"""Puts an engine on a denoiser, and says beforehand where that cannot be."""

from __future__ import annotations

import torch

from ..core.place import LAST, Rank
from ..core.root import RootHook
from ..models.spec import ModelSpec
from .engine import CacheRecipe, Engine
from .gates.base import SAMPLER
from .observe import cannot_observe


def why_unfit(recipe: CacheRecipe, module: torch.nn.Module, spec: ModelSpec) -> str | None:
    """Why this recipe cannot act on this denoiser, or None."""
    policy, scope = recipe.policy, recipe.scope
    hidden = cannot_observe(spec, policy.gate)
    if hidden is not None:
        return hidden
    if policy.gate.observes == SAMPLER and recipe.steps is None:
        return f"{type(policy.gate).__name__} is led by step control: use cache='adaptive'"
    if recipe.per_sample and not policy.static and not scope.takes_samples:
        return f"per_sample needs the scope Stack or Denoiser, not {type(scope).__name__}"
    return scope.unfit(policy, module, spec)


def put_on(
    name: str, module: torch.nn.Module, root: RootHook, spec: ModelSpec, recipe: CacheRecipe, rank: Rank = LAST
) -> Engine:
    """An engine at work; end it with its `undo`."""
    engine = Engine(name, module, root, spec, recipe)
    engine.stop_listening = root.add(engine, rank)
    return engine
