"""Order and conflicts, as one table: keyed by place (what can be on only once), not pair by pair.

Adding a lever adds one line here. `since` of None means "not in this version".
"""

from __future__ import annotations

from dataclasses import dataclass

from .accelerator import Slot


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
        Place("quantization", Slot.WEIGHT, 1, ("fp8", "int8", "svdquant"), ready=(), prefixes=("quantization_",)),
        Place("compile", Slot.MODULE, 0, (True, False), ready=(True, False), prefixes=("compile_",)),
        Place("offload", Slot.MODULE, 1, ("stage", "layerwise"), ready=(), prefixes=("offload_",)),
        Place("vae_tiling", Slot.MODULE, 2, ("exact", "blended"), ready=("blended",), prefixes=("vae_tiling_",)),
        Place(
            "attention", Slot.CALL, 0, ATTENTION, ready=("auto", "native", "flash", "flex"), prefixes=("attention_",)
        ),
        Place("guidance", Slot.CALL, 1, ("reuse",), ready=("reuse",), prefixes=("guidance_",)),
        Place("cache", Slot.CALL, 2, CACHES, ready=CACHES, prefixes=("cache_",)),
    )
}


def in_order(keys: list[str]) -> list[str]:
    """Places in the order in which they are attached."""
    slots = list(Slot)
    return sorted(keys, key=lambda key: (slots.index(PLACES[key].slot), PLACES[key].order))
