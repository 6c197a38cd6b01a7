"""The cards, sorted, and how a pipeline finds its own."""

from __future__ import annotations

from typing import Any

from ..core.compat import unwrap_module
from . import flux, sd3, sdxl, wan
from .spec import ModelSpec

CARDS: dict[str, ModelSpec] = {card.family: card for card in (flux.CARD, sd3.CARD, sdxl.CARD, wan.CARD)}

DENOISERS = ("transformer", "unet", "prior", "decoder", "transformer_2")


def lookup(pipe: Any) -> ModelSpec:
    """The card of a pipeline, by the class name of its denoiser.

    A model without a card gets one that knows only where the denoiser is (`family="unknown"`): runs are still
    timed and reported, and every lever that needs to know more is refused with the class named.
    """
    found: list[str] = []
    for component in DENOISERS:
        module = getattr(pipe, component, None)
        if module is None:
            continue
        name = type(unwrap_module(module)).__name__
        config = getattr(module, "config", None)
        for card in CARDS.values():
            known = component in card.denoisers and name in card.classes
            if known and all(getattr(config, key, None) == value for key, value in card.config):
                return card
        found.append(component)
    denoisers = tuple(found[:1])
    name = type(unwrap_module(getattr(pipe, denoisers[0]))).__name__ if denoisers else "no denoiser"
    return ModelSpec(
        family="unknown",
        denoisers=denoisers,
        classes=(),
        no_stack=f"diffaccel has no card for {name} in this version (families: {', '.join(CARDS)})",
    )
