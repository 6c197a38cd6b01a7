"""The lever behind the manager of LoRAs: which adapters lie on which layers, with what strength, and their undo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.chain import Link
from ...core.compat import copies_held, host_edit, unwrap_module
from ...core.place import Rank
from ...core.run import Run
from ...core.wrappers import peft_wrapped
from ...errors import IncompatibleError, InvalidOptionError
from ..swap import ON_META, fused_since, on_meta, taken_away
from .call_scale import CallScale, scale_in, watch
from .control import widen
from .layers import bypassed, put_on, refusal
from .pairs import Pair, Replaced, Weights

LOADED = "has LoRAs that were loaded by diffusers: pipe.unload_lora_weights() first, then load them here"
WRAPPED = "is wrapped by peft (get_peft_model): give the pipeline {}.merge_and_unload() or {}.unload(), then load here"


def foreign(component: str, module: torch.nn.Module) -> str:
    """Where diffusers or peft put adapters on this model, what to do about it; else ""."""
    if peft_wrapped(module):
        return f"{component} {WRAPPED.format(component, component)}"
    return f"{component} {LOADED}" if getattr(unwrap_module(module), "peft_config", None) else ""


Parts = Mapping[str, float | Mapping[str, float]]  # component -> factor, or part of a layer's name -> factor


@dataclass(frozen=True, eq=False)
class Adapter:
    """One loaded LoRA: its pairs per layer, and the strength it is applied with.

    Attributes:
        parts: factors on the strength by component, and there by part of a layer's name (diffusers' `set_adapters`
            with dicts); 1 where nothing is said.
        active: one of those that `set_adapters` named.
        muted: switched off by `disable_lora`.
    """

    name: str
    weights: Weights = field(repr=False)
    strength: float = 1.0
    merge: bool = False
    parts: Parts = field(default_factory=dict)
    active: bool = True
    muted: bool = False

    def at(self, component: str, layer: str) -> float:
        """The strength in one layer."""
        if self.muted or not self.active:
            return 0.0
        part = self.parts.get(component, 1.0)
        if isinstance(part, Mapping):
            part = next((factor for name, factor in part.items() if name in layer), 1.0)
        return self.strength * part


@dataclass(frozen=True)
class Applied:
    """What one adapter does to one layer. `how`: "branch", "low-rank branch" (of a 4-bit layer), "merged", or
    "replaced" (norms of a Control LoRA)."""

    component: str
    layer: str
    adapter: str
    rank: int
    strength: float
    how: str


@dataclass
class LoraEdit(Edit):
    """An edit that remembers what it applied, and has the factor of the current call by component."""

    applied: tuple[Applied, ...] = ()
    scales: Mapping[str, CallScale] = field(default_factory=dict)


@dataclass(frozen=True)
class Lora:
    """The lever behind the manager.

    Attributes:
        adapters: what is loaded, in order; one of strength 0 changes nothing, bit by bit.
    """

    adapters: tuple[Adapter, ...] = ()

    name: ClassVar[str] = "lora"
    slot: ClassVar[Slot] = Slot.WEIGHT
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT  # the picture that was asked for

    def params(self) -> dict[str, Any]:
        """For the plan."""
        return {"adapters": self.adapters}

    def check(self, target: Target) -> Verdict:
        """Needs layers that nobody else has put an adapter on."""
        for component in {name for adapter in self.adapters for name in adapter.weights}:
            module = getattr(target.pipe, component, None)
            if module is None:
                return Verdict.no(f"the pipeline has no {component}", InvalidOptionError)
            theirs = foreign(component, module)
            if theirs:
                return Verdict.refuse(theirs, IncompatibleError)
            why = self._held(component, unwrap_module(module))
            if why:
                return Verdict.refuse(f"{component}: {why}", IncompatibleError)
        said = ", ".join(_said(adapter) for adapter in self.adapters)
        return Verdict.yes(said or "nothing loaded")

    def _held(self, component: str, module: torch.nn.Module) -> str:
        """Why an adapter would have no effect on one of its layers, or ""."""
        named = (name for a in self.adapters for name in a.weights.get(component, {}) if a.at(component, name))
        fused = fused_since(component, module, named)
        if fused:
            return f"{fused}, then load the LoRA"
        merging = any(adapter.merge and component in adapter.weights for adapter in self.adapters)
        copies = copies_held(module) if merging else ""
        if copies:
            return f"{copies}; without merge=True it needs neither"
        rows = ((a, *item) for a in self.adapters for item in a.weights.get(component, {}).items())
        for name, added in ((name, added) for a, name, added in rows if a.at(component, name)):
            if on_meta(module, name):
                return f"the weight of {name} {ON_META}"
            layer = module.get_submodule(name)
            if bypassed(layer):
                return f"something else holds the forward of {name}: take it off, load the LoRA, put it on again"
            why = refusal(layer, added)
            if why:
                return f"{name}: {why}"
        return ""

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Nothing is promised."""
        return {"origin": "unmeasured"}

    @host_edit
    def attach(self, target: Target, site: Site) -> Edit:
        """Let every adapter act on its layers."""
        weights = self.weights(target)
        state = _Attached(self, target, site.rank)
        state.put_on()
        return LoraEdit(
            self.name,
            state.take_off,
            begin_run=state.begin_run,
            relink=state.relink,
            stats=lambda run: {"layers": len({(row.component, row.layer) for row in state.applied})},
            no_undo=state.lost,
            applied=tuple(state.applied),
            scales=state.scales,
            on_weights=True,
            weights=weights,
        )

    def weights(self, target: Target) -> frozenset[str]:
        """The components whose weights become others: merged, replaced or widened; branches leave them as they are."""
        found = set()
        for component, layer, loaded, merge in self.layers():
            added = [one for _, one, _ in loaded]
            module = unwrap_module(getattr(target.pipe, component)).get_submodule(layer)
            if merge or any(isinstance(one, Replaced) for one in added) or _width(module, added) is not None:
                found.add(component)
        return frozenset(found)

    def layers(self) -> list[tuple[str, str, list[tuple[str, Pair | Replaced, float]], bool]]:
        """(component, layer, its adapters, whether all of them may be merged), each layer once."""
        found: dict[tuple[str, str], list[tuple[str, Pair | Replaced, float]]] = {}
        merged: dict[tuple[str, str], bool] = {}
        for adapter in self.adapters:
            for component, pairs in adapter.weights.items():
                for layer, pair in pairs.items():
                    key, strength = (component, layer), adapter.at(component, layer)
                    if strength:
                        found.setdefault(key, []).append((adapter.name, pair, strength))
                        merged[key] = merged.get(key, True) and adapter.merge
        return [(*key, loaded, merged[key]) for key, loaded in found.items()]


def _said(adapter: Adapter) -> str:
    off = " (disabled)" if adapter.muted else "" if adapter.active else " (not active)"
    return f"{adapter.name} at {adapter.strength:g}{off}"


class _Attached:
    """All adapters on one pipeline."""

    def __init__(self, lever: Lora, target: Target, rank: Rank) -> None:
        self.lever, self.target, self.rank = lever, target, rank
        self.undos: list[Callable[[], None]] = []
        self.applied: list[Applied] = []
        self.scales: dict[str, CallScale] = {}
        self.links: list[Link] = []
        self.modules: dict[str, torch.nn.Module] = {}  # those that were edited: the pipeline may be gone at undo

    def put_on(self) -> None:
        """Every layer; on an error nothing stays."""
        for component, _, _, _ in self.lever.layers():
            self.modules[component] = getattr(self.target.pipe, component)
        try:
            for component, layer, loaded, merge in self.lever.layers():
                self._put_on_layer(component, layer, loaded, merge)
            for component, scale in self.scales.items():
                merged = {row.adapter for row in self.applied if (row.component, row.how) == (component, "merged")}
                scale.merged = tuple(sorted(merged))
                if not component.startswith("text_encoder"):
                    self.links.append(watch(self.modules[component], scale, self.rank))
        except BaseException:
            self.take_off()
            raise

    def _put_on_layer(
        self, component: str, layer: str, loaded: list[tuple[str, Pair | Replaced, float]], merge: bool
    ) -> None:
        module = unwrap_module(self.modules[component])
        dtype = getattr(module, "dtype", torch.float32)
        width = _width(module.get_submodule(layer), [added for _, added, _ in loaded])
        if width is not None:
            self.undos.append(widen(module, layer, width))
        scale = self.scales.setdefault(component, CallScale())
        how, back = put_on(module.get_submodule(layer), loaded, dtype, merge, scale)
        self.undos.append(back)
        self.applied += [Applied(component, layer, name, pair.rank, s, how) for name, pair, s in loaded]

    def take_off(self) -> None:
        """Every layer has its own bits back."""
        while self.links:
            self.links.pop().remove()
        while self.undos:
            self.undos.pop()()

    def begin_run(self, run: Run) -> None:
        """A LoRA or a scale that cannot act is refused before anything is computed."""
        fused = self._fused(branches=True)
        if fused:
            raise IncompatibleError(f"lora: {fused} (a LoRA beside it has no effect)")
        value = None if run.request is None else scale_in(run.request[2])
        if value is not None:
            for scale in self.scales.values():
                scale.require(value)

    def relink(self) -> None:
        """Before a run: what another library dropped is put back."""
        for link in self.links:
            link.relink()

    def lost(self) -> str:
        """Before an undo: a weight that others moved or fused since cannot be given its bits back."""
        for row in self.applied:
            module = unwrap_module(self.modules[row.component])
            if row.how == "merged" and taken_away(module.get_submodule(row.layer)):
                return f"the weight of {row.layer} {ON_META}"
        merged = {row.component for row in self.applied if row.how == "merged"}
        copies = (copies_held(self.modules[component]) for component in sorted(merged))
        return self._fused(branches=False) or next(filter(None, copies), "")

    def _fused(self, branches: bool) -> str:
        """Which layers with branches (or with merged weights) were fused since, and the way out."""
        for component in self.scales:
            names = (r.layer for r in self.applied if r.component == component and (r.how != "merged") is branches)
            fused = fused_since(component, unwrap_module(self.modules[component]), names)
            if fused:
                return fused
        return ""


def _width(layer: torch.nn.Module, added: Sequence[Pair | Replaced]) -> int | None:
    """The inputs a linear layer must get for a Control LoRA; None where it has as many."""
    if not isinstance(layer, torch.nn.Linear):  # (others take no wider input: `refusal` says so)
        return None
    width = max((pair.down.shape[1] for pair in added if isinstance(pair, Pair)), default=0)
    return width if width > layer.in_features else None
