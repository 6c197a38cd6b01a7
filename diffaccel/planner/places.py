"""Order and conflicts, as one table: keyed by place (what can be on only once), not pair by pair.

Adding a lever adds one line here. `since` of None means "not in this version".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.accelerator import Slot


@dataclass(frozen=True)
class Place:
    """An exclusive place of a pipeline: one of `values` at a time.

    `slot` gives the order (WEIGHT, MODULE, CALL), `order` the order within a slot: later ones sit outside, and
    caches sit outermost so that a skipped block's weights are never moved. `values` are the override values;
    `ready` those this version can attach.
    """

    key: str
    slot: Slot
    order: int
    values: tuple[str | bool, ...]
    ready: tuple[str | bool, ...] = ()
    prefixes: tuple[str, ...] = ()  # override keys of its parameters: `cache_threshold` -> threshold

    def item(self, value: str | bool) -> str:
        """Plan item name of a value: `cache.first_block`; a switch has the bare name of its place."""
        if isinstance(value, bool):
            return self.key
        return f"{self.key.replace('vae_tiling', 'vae.tiling')}" if self.key == "vae_tiling" else f"{self.key}.{value}"


CACHES = (
    "teacache", "first_block", "dbcache", "taylorseer", "magcache", "seacache", "easycache", "dicache", "interval",
    "schedule", "deepcache", "delta_dit", "adacache", "custom",
)  # fmt: skip
KERNELS = ("auto", "native", "flash", "flash3", "cudnn", "xformers", "flex", "sage")
SPARSE = ("radial", "sta", "svg", "svg2", "topk", "sparse_auto", "custom")
ATTENTION = KERNELS + SPARSE

PLACES: dict[str, Place] = {
    p.key: p
    for p in (
        Place("fusion", Slot.WEIGHT, 0, (True, False), ready=(False,)),
        Place(
            "quantization",
            Slot.WEIGHT,
            1,
            ("fp8", "int8", "svdquant"),
            ready=("fp8", "int8", "svdquant"),
            prefixes=("quantization_",),
        ),
        Place("lora", Slot.WEIGHT, 2, (True, False), ready=(True, False), prefixes=("lora_",)),
        Place("compile", Slot.MODULE, 0, (True, False), ready=(True, False), prefixes=("compile_",)),
        Place("offload", Slot.MODULE, 1, ("stage", "layerwise"), ready=("stage", "layerwise"), prefixes=("offload_",)),
        Place(
            "vae_tiling", Slot.MODULE, 2, ("exact", "blended"), ready=("exact", "blended"), prefixes=("vae_tiling_",)
        ),
        Place("attention", Slot.CALL, 0, ATTENTION, ready=ATTENTION, prefixes=("attention_",)),
        Place("guidance", Slot.CALL, 1, ("reuse",), ready=("reuse",), prefixes=("guidance_",)),
        Place("cache", Slot.CALL, 2, CACHES, ready=CACHES, prefixes=("cache_",)),
    )
}


@dataclass(frozen=True)
class Rule:
    """One wish that wants another: `value` of `key` (with these parameters) wants `wanted` of `place`.

    Where nothing is said about `place`, the wanted value is taken too; where it was switched off, the plan says what
    that costs. `gains` are the devices on which there is something to gain by it.
    """

    key: str
    value: str | bool
    place: str
    wanted: str | bool
    reason: str
    parameters: tuple[tuple[str, tuple[object, ...]], ...] = ()  # (parameter, values for which the rule holds)
    gains: tuple[str, ...] = ("cpu", "cuda")

    def holds(self, wishes: Mapping[str, object], device: str) -> bool:
        """Does the rule speak about these wishes on this kind of device?"""
        named = wishes.get(self.key) == self.value and device in self.gains
        return named and all(wishes.get(name, values[0]) in values for name, values in self.parameters)


RULES: tuple[Rule, ...] = (
    Rule(
        "quantization",
        "int8",
        "compile",
        True,
        "INT8 dynamic wants compile: run eagerly, quantizing and rescaling cost more than the products save",
        (("quantization_scheme", ("dynamic",)),),
        gains=("cuda", "cpu with INT8 units"),
    ),
)


def in_order(keys: list[str]) -> list[str]:
    """Places in the order in which they are attached."""
    slots = list(Slot)
    return sorted(keys, key=lambda key: (slots.index(PLACES[key].slot), PLACES[key].order))
