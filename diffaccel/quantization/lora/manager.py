"""One manager of LoRAs for an accelerated pipeline: `pipe.acceleration.loras`.

Strengths are absolute (set twice is set once), unloading gives the bits back, and the order of the calls does not
matter: adapters always lie on top of the weights as they are after quantization and below compile and offload, and
are put on anew whenever one of these changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.compat import host_edit, unwrap_module
from ...core.options import BOOLEAN, Check, confirm, is_number
from ...errors import DiffaccelError, IncompatibleError, InvalidOptionError, unknown
from ..swap import ON_META, on_meta
from .control import widen
from .files import read
from .layers import bypassed, put_on, refusal
from .pairs import Pair, Replaced, Weights

if TYPE_CHECKING:
    from ...handle import Acceleration


FOREIGN = "has LoRAs that were loaded by diffusers: pipe.unload_lora_weights() first, then load them here"


def foreign(module: torch.nn.Module) -> bool:
    """Did diffusers or peft put adapters on this model?"""
    return bool(getattr(unwrap_module(module), "peft_config", None))


@dataclass(frozen=True, eq=False)
class Adapter:
    """One loaded LoRA: its pairs per layer, and the strength it is applied with."""

    name: str
    weights: Weights = field(repr=False)
    strength: float = 1.0
    merge: bool = False


@dataclass(frozen=True)
class Applied:
    """What one adapter does to one layer. `how`: "branch", "low-rank branch" (of a 4-bit layer) or "merged"."""

    component: str
    layer: str
    adapter: str
    rank: int
    strength: float
    how: str


@dataclass
class LoraEdit(Edit):
    """An edit that remembers what it applied."""

    applied: tuple[Applied, ...] = ()


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
            if foreign(module):
                return Verdict.refuse(f"{component} {FOREIGN}", IncompatibleError)
            why = self._held(component, unwrap_module(module))
            if why:
                return Verdict.refuse(f"{component}: {why}", IncompatibleError)
        said = ", ".join(f"{adapter.name} at {adapter.strength:g}" for adapter in self.adapters)
        return Verdict.yes(said or "nothing loaded")

    def _held(self, component: str, module: torch.nn.Module) -> str:
        """Why an adapter would have no effect on one of its layers, or ""."""
        rows = (item for a in self.adapters if a.strength for item in a.weights.get(component, {}).items())
        for name, added in rows:
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
        undos: list[Any] = []
        applied: list[Applied] = []

        def undo() -> None:
            while undos:
                undos.pop()()

        try:
            for component, layer, loaded, merge in self._layers():
                module = unwrap_module(getattr(target.pipe, component))
                dtype = getattr(module, "dtype", torch.float32)
                width = _width(module.get_submodule(layer), [added for _, added, _ in loaded])
                if width is not None:
                    undos.append(widen(module, layer, width))
                how, back = put_on(module.get_submodule(layer), loaded, dtype, merge)
                undos.append(back)
                applied += [Applied(component, layer, name, pair.rank, s, how) for name, pair, s in loaded]
        except BaseException:
            undo()
            raise
        merged = [row for row in applied if row.how == "merged"]

        def lost() -> str:
            """Before an undo: a weight that accelerate has taken away since cannot be given its bits back."""
            modules = {row.component: unwrap_module(getattr(target.pipe, row.component)) for row in merged}
            away = next((row.layer for row in merged if on_meta(modules[row.component], row.layer)), None)
            return "" if away is None else f"the weight of {away} {ON_META}"

        return LoraEdit(
            self.name, undo, stats=lambda run: {"layers": len(undos)}, applied=tuple(applied), no_undo=lost
        )

    def _layers(self) -> list[tuple[str, str, list[tuple[str, Pair | Replaced, float]], bool]]:
        """(component, layer, its adapters, whether all of them may be merged), each layer once."""
        found: dict[tuple[str, str], list[tuple[str, Pair | Replaced, float]]] = {}
        merged: dict[tuple[str, str], bool] = {}
        for adapter in self.adapters:
            if adapter.strength == 0:
                continue
            for component, pairs in adapter.weights.items():
                for layer, pair in pairs.items():
                    key = component, layer
                    found.setdefault(key, []).append((adapter.name, pair, adapter.strength))
                    merged[key] = merged.get(key, True) and adapter.merge
        return [(*key, loaded, merged[key]) for key, loaded in found.items()]


class Loras:
    """The LoRAs of one accelerated pipeline."""

    def __init__(self, handle: Acceleration) -> None:
        self._handle = handle

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """What is loaded, in order."""
        found: tuple[Adapter, ...] = self._handle.wishes.get("lora_adapters", ())
        return found

    @property
    def strengths(self) -> dict[str, float]:
        """Name -> strength."""
        return {adapter.name: adapter.strength for adapter in self.adapters}

    @property
    def report(self) -> tuple[Applied, ...]:
        """What was applied, layer by layer."""
        for edit in self._handle.stack.edits:
            if isinstance(edit, LoraEdit):
                return edit.applied
        return ()

    def load(
        self,
        source: Any,
        name: str | None = None,
        strength: float = 1.0,
        *,
        layers: str | Sequence[str] | None = None,
        component: str | None = None,
        merge: bool = False,
        **options: Any,
    ) -> Any:
        """Load an adapter and apply it; returns the pipeline.

        Args:
            source: a file, a folder, a hub name or a state dict, in any format `pipe.load_lora_weights` reads.
            name: to set or unload it by; "lora_0", "lora_1", ... where none is given.
            strength: absolute; 0 keeps it loaded without effect.
            layers: patterns ("*.attn1.*") of the layers to apply it to; all of the file's where None.
            component: put the denoiser's layers into this component ("transformer_2" of Wan 2.2).
            merge: add it to weights of 16 bits or more, which costs no time per step and a second copy of these
                weights; layers in 8 or 4 bits keep a branch.
            **options: those of `pipe.load_lora_weights` (weight_name, subfolder, ...).

        Raises:
            InvalidOptionError: the name is taken or no text, there is no such file, a key fits no layer or not its
                shape (all are listed), a pattern matches nothing. Nothing is applied then.
            UnsupportedModelError: the pipeline has no LoRA loader.
            IncompatibleError: diffusers' own LoRAs are loaded, or a run is in progress.
        """
        self._require_life()
        name = _name(name) if name is not None else _free(self.strengths)
        strength = _strength(strength)
        if name in self.strengths:
            raise InvalidOptionError(f"name={name!r}: a LoRA of this name is loaded; unload it or choose another name")
        merge = confirm("merge", merge, BOOLEAN)
        patterns = _patterns(layers)
        for component_name, module in self._handle.pipe.components.items():
            if isinstance(module, torch.nn.Module) and foreign(module):
                raise IncompatibleError(f"lora: {component_name} {FOREIGN}")
        weights: Weights = read(self._handle.pipe, source, component, patterns, **options)
        return self._adopt((*self.adapters, Adapter(name, weights, strength, merge)))

    def set(self, strengths: Mapping[str, float]) -> Any:
        """Set (not add to) strengths by name; adapters that are not named stay as they are. Returns the pipeline."""
        if not isinstance(strengths, Mapping):
            raise InvalidOptionError(f"strengths={strengths!r}: must be a dict of names and strengths")
        for name in map(_name, strengths):
            if name not in self.strengths:
                raise unknown("LoRA", name, self.strengths)
        changed = {name: _strength(value) for name, value in strengths.items()}
        return self._adopt(tuple(replace(a, strength=changed.get(a.name, a.strength)) for a in self.adapters))

    def unload(self, name: str | None = None) -> Any:
        """Take one adapter off, or all; the weights are what they were, bit by bit. Returns the pipeline."""
        if name is not None and _name(name) not in self.strengths:
            raise unknown("LoRA", name, self.strengths)
        return self._adopt(tuple(a for a in self.adapters if name is not None and a.name != name))

    def _require_life(self) -> None:
        if self._handle.retired:
            raise DiffaccelError("loras: the pipeline of this handle was restored; accelerate it again first")

    def _adopt(self, adapters: tuple[Adapter, ...]) -> Any:
        self._require_life()
        handle = self._handle
        wishes = {key: value for key, value in handle.wishes.items() if key not in ("lora", "lora_adapters")}
        if adapters:
            verdict = Lora(adapters).check(handle.stack.target)
            if not verdict.ok:
                raise verdict.error(f"lora: {verdict.reason}")
            wishes |= {"lora": True, "lora_adapters": adapters}
        handle.adopt(handle.decide_again(wishes))
        return handle.pipe

    def __repr__(self) -> str:
        return f"Loras({self.strengths})"


def _free(taken: Mapping[str, float]) -> str:
    return next(f"lora_{i}" for i in range(len(taken) + 1) if f"lora_{i}" not in taken)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidOptionError(f"name={value!r}: must be the name of a LoRA, as text")
    return value


def _patterns(layers: Any) -> list[str] | None:
    if layers is None or isinstance(layers, str):
        return layers if layers is None else [layers]
    if not isinstance(layers, Sequence) or not all(isinstance(pattern, str) for pattern in layers):
        raise InvalidOptionError(f"layers={layers!r}: must be a pattern, or a list of patterns")
    return list(layers)


def _strength(value: Any) -> float:
    return float(confirm("strength", value, Check("a finite number", is_number)))


def _width(layer: torch.nn.Module, added: Sequence[Pair | Replaced]) -> int | None:
    """The inputs a linear layer must get for a Control LoRA; None where it has as many."""
    if not isinstance(layer, torch.nn.Linear):
        return None
    width = max((pair.down.shape[1] for pair in added if isinstance(pair, Pair)), default=0)
    return width if width > layer.in_features else None
