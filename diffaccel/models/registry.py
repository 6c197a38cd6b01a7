"""The cards, sorted, and how a pipeline finds its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..core.compat import unwrap_module
from .spec import ModelSpec

FAMILIES = (
    "chroma",
    "cogvideox",
    "flux",
    "flux2",
    "hunyuan_video",
    "hunyuan_video15",
    "ltx",
    "ltx2",
    "mochi",
    "pixart",
    "qwen",
    "sana",
    "sd3",
    "sdxl",
    "wan",
    "z_image",
)

CARDS: dict[str, ModelSpec] = {name: import_module(f".{name}", __package__).CARD for name in FAMILIES}

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
