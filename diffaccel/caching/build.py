"""Puts an engine with the tap of its scope on a denoiser, and says beforehand where that cannot be."""

from __future__ import annotations

import torch

from ..core.chain import RootHook
from ..models.spec import ModelSpec
from .engine import Engine, Recipe, Tap
from .gates.base import MODULATED, PAIR, PROBE
from .observe import blind
from .scopes.config import Deep, Denoiser, Halves, Modules, Stack
from .scopes.denoiser import DenoiserTap
from .scopes.halves import HalvesTap
from .scopes.modules import ModuleTap, modules_of
from .scopes.stack import StackTap, blocks_of
from .scopes.unet import UNetTap, parts_left_out, unfit_unet

IN_BLOCKS = (PROBE, PAIR, MODULATED)


def unfit(recipe: Recipe, module: torch.nn.Module, spec: ModelSpec) -> str | None:
    """Why this recipe cannot act on this denoiser, or None."""
    gate, scope = recipe.policy.gate, recipe.scope
    sightless = blind(spec, gate)
    if sightless is not None:
        return sightless
    in_blocks = gate.observes in IN_BLOCKS
    if recipe.per_sample and not recipe.policy.static and not isinstance(scope, (Stack, Denoiser)):
        return f"per_sample needs the scope Stack or Denoiser, not {type(scope).__name__}"
    if isinstance(scope, Denoiser) and scope.correct > recipe.policy.predictor.depth:
        return f"correct={scope.correct} needs a forecast of order {scope.correct - 1} or more"
    if isinstance(scope, Denoiser) and not in_blocks:
        return None
    if isinstance(scope, Deep):
        looks = f"a gate that looks at blocks cannot decide here: {spec.no_stack}" if in_blocks else None
        return unfit_unet(scope, module, spec) or looks
    if not spec.stack:
        return f"{spec.family}: {spec.no_stack}"
    count = len(blocks_of(module, spec))
    if isinstance(scope, Halves):
        if in_blocks:
            return "halves of the stack need a gate that decides before the blocks run"
        return None if count >= 2 else f"{count} block(s): there are no two halves"
    if in_blocks and gate.observes != MODULATED and scope.front < 1:
        return "a gate that looks at a probe needs at least one front block"
    if isinstance(scope, Modules):
        lacking = [row.attribute for row in spec.stack if not row.modules]
        if lacking:
            return f"the card of the family {spec.family} does not name the modules of {', '.join(lacking)}"
    back = scope.back if isinstance(scope, Stack) else 0
    if scope.front + back >= count:
        always = f"{scope.front} front and {back} back block(s)" if back else f"{scope.front} front block(s)"
        return f"{count} block(s), of which {always} always run: nothing would be left to skip"
    edge = len(getattr(module, spec.stack[0].attribute))
    if scope.front > edge and any(row.joins for row in spec.stack):
        return f"front={scope.front} reaches beyond the {edge} {spec.stack[0].attribute}, where the streams are joined"
    return None


def blocks_left_out(recipe: Recipe, module: torch.nn.Module, spec: ModelSpec) -> list[torch.nn.Module]:
    """The modules whose weights a reused step does not touch."""
    scope = recipe.scope
    if isinstance(scope, Denoiser) and scope.front == 0:
        return [module]
    if isinstance(scope, Deep):
        return [] if spec.unet is None else [part.module for part in parts_left_out(module, spec.unet, scope.branch)]
    blocks = blocks_of(module, spec)
    if isinstance(scope, Halves):
        return [block for block, _ in blocks[len(blocks) // 2 :]]
    if isinstance(scope, Modules):
        return [module for block, row in blocks[scope.front :] for _, module in modules_of(block, row)]
    back = scope.back if isinstance(scope, Stack) else 0
    return [block for block, _ in blocks[scope.front : len(blocks) - back]]


def put_on(name: str, module: torch.nn.Module, root: RootHook, spec: ModelSpec, recipe: Recipe) -> Engine:
    """An engine at work; end it with its `undo`."""
    engine = Engine(name, module, root, spec, recipe)
    engine.tap = _tap(engine)
    root.listeners.append(engine)
    return engine


def _tap(engine: Engine) -> Tap:
    scope = engine.recipe.scope
    if isinstance(scope, Denoiser):
        return DenoiserTap(engine, scope)
    if isinstance(scope, Modules):
        return ModuleTap(engine, scope)
    if isinstance(scope, Halves):
        return HalvesTap(engine, scope)
    if isinstance(scope, Deep):
        return UNetTap(engine, scope)
    count = len(blocks_of(engine.module, engine.spec))
    return StackTap(engine, scope.front, count - scope.back)
