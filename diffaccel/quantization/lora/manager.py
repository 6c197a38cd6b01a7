"""One manager of LoRAs for an accelerated pipeline: `pipe.acceleration.loras`.

Strengths are absolute (set twice is set once), unloading gives the bits back, and the order of the calls does not
matter: adapters always lie on top of the weights as they are after quantization and below compile and offload, and
are put on anew whenever one of these changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ...core.options import BOOLEAN, Check, confirm, is_number
from ...errors import DiffaccelError, IncompatibleError, InvalidOptionError, unknown
from .call_scale import CallScale
from .files import read
from .lever import Adapter, Applied, LoraEdit, Parts, foreign
from .pairs import Weights

if TYPE_CHECKING:
    from ...handle import Acceleration


class Loras:
    """The LoRAs of one accelerated pipeline."""

    def __init__(self, handle: Acceleration) -> None:
        self._handle = handle

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """What is loaded, in order."""
        return cast("tuple[Adapter, ...]", self._handle.wishes.get("lora_adapters", ()))

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
        strength = strength_of(strength)
        if name in self.strengths:
            raise InvalidOptionError(f"name={name!r}: a LoRA of this name is loaded; unload it or choose another name")
        merge = confirm("merge", merge, BOOLEAN)
        patterns = _patterns(layers)
        for component_name, module in self._handle.pipe.components.items():
            theirs = foreign(component_name, module) if isinstance(module, torch.nn.Module) else ""
            if theirs:
                raise IncompatibleError(f"lora: {theirs}")
        weights: Weights = read(self._handle.pipe, source, component, patterns, **options)
        return self._adopt((*self.adapters, Adapter(name, weights, strength, merge, muted=self.muted)))

    def set(self, strengths: Mapping[str, float]) -> Any:
        """Set (not add to) strengths by name; adapters that are not named stay as they are. Returns the pipeline."""
        if not isinstance(strengths, Mapping):
            raise InvalidOptionError(f"strengths={strengths!r}: must be a dict of names and strengths")
        for name in map(_name, strengths):
            if name not in self.strengths:
                raise unknown("LoRA", name, self.strengths)
        changed = {name: strength_of(value) for name, value in strengths.items()}
        return self._adopt(
            tuple(
                replace(a, strength=changed[a.name], parts={}, active=True, muted=False) if a.name in changed else a
                for a in self.adapters
            )
        )

    def activate(self, chosen: Mapping[str, tuple[float, Parts]]) -> Any:
        """Only these adapters act, each with its strength and factors by component; the others stay loaded."""
        for name in chosen:
            if name not in self.strengths:
                raise unknown("LoRA", name, self.strengths)
        return self._adopt(tuple(_activated(a, chosen.get(a.name)) for a in self.adapters))

    @property
    def muted(self) -> bool:
        """Are all adapters switched off (`disable_lora`)? One that is loaded meanwhile is off as well."""
        return bool(self.adapters) and all(adapter.muted for adapter in self.adapters)

    def mute(self, muted: bool) -> Any:
        """Switch all adapters off, or on again, with the strengths they have."""
        return self._adopt(tuple(replace(a, muted=muted) for a in self.adapters))

    def over(self, wishes: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """(what keeps the LoRAs through another `accelerate` with these wishes, a note for the plan)."""
        names = ", ".join(self.strengths)
        if not names or wishes.get("lora"):
            return {}, None
        if "lora" in wishes:  # lora=False
            return {}, f"unloaded LoRAs: {names}"
        return {"lora": True, "lora_adapters": self.adapters}, f"LoRAs stay loaded (lora=False unloads them): {names}"

    @property
    def alive(self) -> bool:
        """Is anything loaded, on a pipeline that is still accelerated?"""
        return not self._handle.retired and bool(self.adapters)

    @property
    def scales(self) -> Mapping[str, CallScale]:
        """Component -> the factor of the current call."""
        return next((edit.scales for edit in self._handle.stack.edits if isinstance(edit, LoraEdit)), {})

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
        handle.change("lora", True if adapters else None, {"adapters": adapters} if adapters else {})
        return handle.pipe

    def __repr__(self) -> str:
        return f"Loras({self.strengths})"


def _activated(adapter: Adapter, chosen: tuple[float, Parts] | None) -> Adapter:
    if chosen is None:
        return replace(adapter, active=False)
    return replace(adapter, strength=chosen[0], parts=chosen[1], active=True)


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


def strength_of(value: Any) -> float:
    """A strength as a number; raises InvalidOptionError where it is none, or not finite."""
    return float(confirm("strength", value, Check("a finite number", is_number)))
